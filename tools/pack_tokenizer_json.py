#!/usr/bin/env python3
"""Packs text into isograd token shards with a Hugging Face tokenizer.json.

    pack_tokenizer_json.py tokenizer.json --out shards [--begin '<s>'] [--end '</s>'] TEXT...

TEXT is what `isograd data pack` takes: UTF-8 files, *.jsonl files (one document a line, field "text"),
directories (names that begin with a dot are left out) and globs, read in the order of their paths. Every document
is encoded with the special tokens that the tokenizer adds by itself; --begin and --end put one more in front or
behind where the tokenizer adds none (GPT-2's does not). The shards are those of `isograd data pack`, format
version 1 (src/data/shard.hpp): written beside, synced, renamed. Status: 0 done, 2 bad input.

Needs the PyPI package `tokenizers`, and XXH3 from the package `xxhash` or from the system's libxxhash.
"""
import argparse
import array
import ctypes
import ctypes.util
import glob
import json
import os
import pathlib
import struct
import sys
import tempfile

MAGIC = b"isograd\x01"
HEADER = struct.Struct("<8sII5QQ")  # magic, version, bytes of a token, documents, tokens, vocabulary, name, file; checksum


class BadInput(Exception):
    pass


class SystemXxh3:
    """XXH3-64 in pieces from libxxhash, with the two methods of xxhash.xxh3_64 that are used here."""

    def __init__(self):
        name = ctypes.util.find_library("xxhash")
        if name is None:
            raise BadInput("no XXH3: found neither the Python package xxhash nor libxxhash; "
                           "run pip install xxhash, or apt-get install libxxhash0")
        self.library = ctypes.CDLL(name)
        self.library.XXH3_createState.restype = ctypes.c_void_p
        self.library.XXH3_64bits_digest.restype = ctypes.c_uint64
        self.state = ctypes.c_void_p(self.library.XXH3_createState())
        self.library.XXH3_64bits_reset(self.state)

    def update(self, data):
        self.library.XXH3_64bits_update(self.state, data, ctypes.c_size_t(len(data)))

    def intdigest(self):
        return self.library.XXH3_64bits_digest(self.state)

    def __del__(self):
        if hasattr(self, "state"):
            self.library.XXH3_freeState(self.state)


def xxh3():
    try:
        import xxhash
        return xxhash.xxh3_64()
    except ImportError:
        return SystemXxh3()


def files_below(directory):
    """Regular files below, each folder once (links may form a loop), without names that begin with a dot."""
    open_folders, seen = [directory.resolve()], {directory.resolve()}
    while open_folders:
        for entry in open_folders.pop().iterdir():
            path = entry.resolve()
            if entry.name.startswith(".") or not path.exists():
                continue
            if path.is_file():
                yield path
            elif path.is_dir() and path not in seen:
                seen.add(path)
                open_folders.append(path)


def resolve(patterns):
    """The files that the patterns name, each once, in the order of their paths."""
    files = set()
    for pattern in patterns:
        found = set()
        for match in [pattern] if os.path.exists(pattern) else glob.glob(pattern):
            path = pathlib.Path(match)
            found.update(files_below(path) if path.is_dir() else [path.resolve()] if path.is_file() else [])
        if not found:
            raise BadInput(f"text pattern {pattern}: found nothing; expected at least one file")
        files |= found
    return sorted(files, key=lambda path: [os.fsencode(part) for part in path.parts])


def documents_of(file):
    data = file.read_bytes()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(f"{file}: found the byte 0x{data[error.start]:02x} at offset {error.start}, which is not UTF-8; "
                       f"expected UTF-8 text") from None
    text = text.removeprefix("\ufeff")
    if file.suffix != ".jsonl":
        yield text
        return
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip(" \t\r"):
            continue
        try:
            document = json.loads(line)["text"]
            if not isinstance(document, str):
                raise TypeError("field \"text\" is no string")
            document.encode("utf-8")  # a lone surrogate is no text
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise BadInput(f"{file}:{number}: found {type(error).__name__}: {error}; "
                           f"expected a JSON object with a string field \"text\"") from None
        yield document


class ShardWriter:
    def __init__(self, path, name, vocabulary):
        self.path, self.name, self.vocabulary = path, name.encode("ascii"), vocabulary
        self.code = "H" if vocabulary <= 65536 else "I"
        assert array.array(self.code).itemsize == (2 if self.code == "H" else 4) and sys.byteorder == "little"
        handle, self.partial = tempfile.mkstemp(prefix="." + path.name + ".partial-", dir=path.parent)
        self.file, self.hash, self.offsets = os.fdopen(handle, "wb"), xxh3(), array.array("Q", [0])
        self.file.write(bytes(HEADER.size))
        self.append(self.name)
        self.pad()

    def append(self, data):
        self.hash.update(data)
        self.file.write(data)

    def pad(self):
        self.append(bytes(-self.file.tell() % 8))

    def add(self, tokens):
        self.append(array.array(self.code, tokens).tobytes())
        self.offsets.append(self.offsets[-1] + len(tokens))

    def finish(self):
        self.pad()
        self.append(self.offsets.tobytes())
        fields = (MAGIC, 1, 2 if self.code == "H" else 4, len(self.offsets) - 1, self.offsets[-1], self.vocabulary,
                  len(self.name), self.file.tell())
        self.hash.update(HEADER.pack(*fields, 0)[:-8])
        self.file.seek(0)
        self.file.write(HEADER.pack(*fields, self.hash.intdigest()))
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        os.chmod(self.partial, 0o644)
        os.replace(self.partial, self.path)
        folder = os.open(self.path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)

    def discard(self):
        if not self.file.closed:
            self.file.close()
            os.unlink(self.partial)


def load_tokenizer(path):
    """The tokenizer and the name that goes into the shards, "tokenizer.json:<XXH3 of the file>"."""
    from tokenizers import Tokenizer
    try:
        content = pathlib.Path(path).read_bytes()
        tokenizer = Tokenizer.from_str(content.decode("utf-8"))
    except Exception as error:  # tokenizers raises plain Exception
        raise BadInput(f"{path}: found {error}; expected a Hugging Face tokenizer.json") from None
    tokenizer.no_truncation()  # both may be set in the file; a document is a document
    tokenizer.no_padding()
    digest = xxh3()
    digest.update(content)
    return tokenizer, f"tokenizer.json:{digest.intdigest():016x}"


def pack(options):
    tokenizer, name = load_tokenizer(options.tokenizer)
    vocabulary = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def special(token):
        number = None if token is None else tokenizer.token_to_id(token)
        if token is not None and number is None:
            raise BadInput(f"token {token}: not in the vocabulary of {options.tokenizer}")
        return [] if number is None else [number]

    begin, end = special(options.begin), special(options.end)
    files = resolve(options.text)
    out = pathlib.Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    shards, writer, documents, tokens, empty = [], None, 0, 0, 0
    try:
        for file in files:
            for text in documents_of(file):
                ids = begin + tokenizer.encode(text).ids + end if text else []
                if not ids:
                    empty += 1
                    continue
                if writer and writer.offsets[-1] + len(ids) > options.shard_tokens:
                    writer.finish()
                    writer = None
                if writer is None:
                    shards.append(out / f"tokens-{name[-16:-8]}-{len(shards):05}.isograd")
                    writer = ShardWriter(shards[-1], name, vocabulary)
                writer.add(ids)
                documents, tokens = documents + 1, tokens + len(ids)
        if writer is None:
            raise BadInput(f"an empty corpus: {len(files)} files, no text in them")
        writer.finish()
    finally:
        if writer:
            writer.discard()
    for stale in set(out.glob("tokens-*.isograd")) - set(shards):
        stale.unlink()
    print(f"{documents} documents, {tokens} tokens from {len(files)} files, vocabulary {vocabulary}")
    if empty:
        print(f"{empty} documents without text were left out")
    for shard in shards:
        print(shard)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", help="a Hugging Face tokenizer.json")
    parser.add_argument("text", nargs="+", metavar="TEXT", help="files, directories or globs")
    parser.add_argument("--out", required=True, help="folder of the shards; others in it are removed")
    parser.add_argument("--begin", metavar="TOKEN", help="put in front of each document, by name")
    parser.add_argument("--end", metavar="TOKEN", help="put behind each document, by name")
    parser.add_argument("--shard-tokens", type=int, default=64 << 20, help="most tokens of a shard (one document at least)")
    options = parser.parse_args()
    try:
        pack(options)
    except (BadInput, OSError) as error:
        print(f"pack_tokenizer_json: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
