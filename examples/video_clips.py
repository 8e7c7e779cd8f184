"""Cuts short clips of different lengths and sizes from the videos of Debian's package opencv-doc, for training.

    python3 examples/video_clips.py [FOLDER]      .cache/isograd/clips unless given

Fetches the package with `apt-get download` and unpacks it next to the clips, which needs no rights; cuts with the
program ffmpeg. What is there already is kept. The videos are a street from above (vtest.avi), a cartoon
(Megamind.avi), a tree (tree.avi) and two objects before a camera (box.mp4, cup.mp4).
"""
import gzip
import pathlib
import shutil
import subprocess
import sys

# Video, first second, seconds, filter: crops and sizes differ, so that the clips' grids of patches do.
CLIPS = {
    "street-long": ("examples/data/vtest.avi", 0, 12, "scale=96:72"),
    "street-left": ("examples/data/vtest.avi", 20, 6, "crop=384:576:0:0,scale=48:72"),
    "street-short": ("examples/data/vtest.avi", 40, 2, "scale=64:48"),
    "street-wide": ("examples/data/vtest.avi", 60, 4, "crop=768:288:0:144,scale=128:48"),
    "cartoon-long": ("examples/data/Megamind.avi", 0, 8, "scale=96:64"),
    "cartoon-face": ("examples/data/Megamind.avi", 4, 3, "crop=360:360:180:60,scale=64:64"),
    "cartoon-short": ("examples/data/Megamind.avi", 9, 1, "scale=48:32"),
    "tree": ("examples/data/tree.avi", 0, 2, "scale=64:48"),
    "box": ("opencv4/html/box.mp4.gz", 2, 5, "scale=80:60"),
    "cup": ("opencv4/html/cup.mp4.gz", 3, 3, "crop=480:480:80:0,scale=56:56"),
}


def fail(found, expected, action):
    sys.exit(f"video_clips: found {found}; expected {expected}. {action}.")


def run(*command, cwd=None):
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        fail(f"`{' '.join(map(str, command))}` failing: {done.stderr.strip()[-500:]}", "it to succeed",
             "Correct what it names, or run it by hand to see more")


def main():
    if len(sys.argv) > 2 or sys.argv[1:2] in (["-h"], ["--help"]):
        return print(__doc__)
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ".cache/isograd/clips")
    for program, package in {"apt-get": "apt", "dpkg": "dpkg", "ffmpeg": "ffmpeg"}.items():
        if not shutil.which(program):
            fail(f"no program {program}", "a Debian or Ubuntu with it", f"Run: sudo apt-get install {package}")
    package = folder.parent / "opencv-doc"
    root = package / "usr/share/doc/opencv-doc"
    if not (root / CLIPS["street-long"][0]).exists():
        package.mkdir(parents=True, exist_ok=True)
        print("fetching opencv-doc (some 95 MB)", file=sys.stderr)
        run("apt-get", "download", "opencv-doc", cwd=package)
        for file in package.glob("opencv-doc_*.deb"):
            run("dpkg", "-x", file, package)
            file.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    for name, (video, begin, seconds, change) in CLIPS.items():
        clip, source = folder / f"{name}.mp4", root / video
        if clip.exists():
            continue
        if not source.exists():
            fail(f"no {source}", "what opencv-doc 4.5 and 4.6 carry", "Remove the folder and fetch the package again")
        if source.suffix == ".gz":
            unpacked = package / source.stem
            unpacked.write_bytes(gzip.decompress(source.read_bytes()))
            source = unpacked
        part = folder / f".{name}.part.mp4"  # a name that no loader takes, until it is whole
        run("ffmpeg", "-v", "error", "-nostdin", "-y", "-ss", str(begin), "-t", str(seconds), "-i", source, "-an",
            "-vf", change, "-c:v", "mpeg4", "-q:v", "3", part)
        part.rename(clip)
    clips = sorted(folder.glob("*.mp4"))
    print(f"{len(clips)} clips in {folder}: {', '.join(clip.stem for clip in clips)}")


if __name__ == "__main__":
    main()
