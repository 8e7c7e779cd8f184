"""Draws text from a terminal as an SVG: terminal_svg.py < output.txt > picture.svg. Used for the README's picture."""
import html
import sys

lines = [line[:118] for line in sys.stdin.read().rstrip("\n").split("\n")]
step, width, height = 17, 980, 17 * len(lines) + 44
print(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img" '
      f'aria-label="terminal output">')
print("<style>text { white-space: pre }</style>")  # browsers have a rule of their own, against xml:space
print(f'<rect width="{width}" height="{height}" rx="8" fill="#14181d"/>')
for i, color in enumerate(("#ff5f57", "#febc2e", "#28c840")):
    print(f'<circle cx="{18 + 18 * i}" cy="16" r="5.5" fill="{color}"/>')
print('<g font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace" font-size="13" fill="#d7dde4" '
      'xml:space="preserve">')
for i, line in enumerate(lines):
    extra = ' fill="#7ee787" font-weight="600"' if line.startswith("parity") else ""
    print(f'<text x="16" y="{46 + step * i}"{extra}>{html.escape(line)}</text>')
print("</g></svg>")
