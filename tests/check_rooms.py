"""Fails when a file includes a room that does not stand above its own in src/rooms.txt.

Checks every #include "..." of src/ and include/isograd/: a file of room R may include the public headers
and the private headers of R and of rooms above R. Tests and the command line's main are held to the same rule.
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def read_rooms():
    order, header_room = [], {}
    for line in (ROOT / "src/rooms.txt").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        room, _, headers = line.partition(":")
        for header in headers.split():
            header_room[header] = room
        order.append(room)
    return order, header_room


def room_of(path, order):
    """The room a path below src/ lies in: the longest room name that is a folder prefix."""
    matches = [room for room in order if path == room or path.startswith(room + "/")]
    return max(matches, key=len) if matches else None


def main():
    order, header_room = read_rooms()
    rank = {room: i for i, room in enumerate(order)}
    problems, files = [], 0
    public = ROOT / "include/isograd"
    for header in sorted(p.name for p in public.glob("*.hpp")):
        if header != "isograd.hpp" and header not in header_room:
            problems.append(f"include/isograd/{header}: not assigned to a room in src/rooms.txt")
    for header in header_room:
        if not (public / header).exists():
            problems.append(f"src/rooms.txt: names include/isograd/{header}, which does not exist")
    for path in sorted([*ROOT.glob("src/**/*.[hc]pp"), *public.glob("*.hpp")]):
        name = path.relative_to(ROOT).as_posix()
        if name == "include/isograd/isograd.hpp":
            continue
        own = header_room.get(path.name) if name.startswith("include/") else room_of(name[len("src/"):], order)
        if own is None:
            problems.append(f"{name}: lies in no room of src/rooms.txt")
            continue
        files += 1
        for number, line in enumerate(path.read_text().splitlines(), 1):
            match = re.match(r'\s*#\s*include\s*[<"](isograd/)?([^">]+)[">]', line)
            if not match:
                continue
            if match.group(1):
                other = header_room.get(match.group(2), "cli" if match.group(2) == "isograd.hpp" else None)
            elif (ROOT / "src" / match.group(2)).exists():
                other = room_of(match.group(2), order)
            else:
                continue  # a library's header
            if other is None or rank[other] > rank[own]:
                problems.append(f"{name}:{number}: room '{own}' includes {match.group(2)} of room '{other}', "
                                f"which does not stand above it")
            axis, mine = f"{other}".split("/"), own.split("/")
            if axis[0] == mine[0] == "parallel" and other != own:
                problems.append(f"{name}:{number}: axis rooms never include one another ({own} -> {other})")
    for problem in problems:
        print(problem)
    print(f"{files} files in {len(order)} rooms, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
