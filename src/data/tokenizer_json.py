# Encodes and decodes with a Hugging Face tokenizer.json for tokenizer_json.cpp, over standard input and output.
# A request is a letter, a length of 8 bytes and that many bytes; an answer the same, its letter one of
# o (the result), e (an error, as text) and m (the package is missing). Ends with its input.
import sys

sys.path[:] = [folder for folder in sys.path if folder]  # not the working folder's modules, which python -c puts first

import array  # noqa: E402
import json  # noqa: E402
import struct  # noqa: E402

HEAD = struct.Struct("<cQ")


def read(count):
    data = sys.stdin.buffer.read(count)
    if len(data) < count:
        sys.exit(0)
    return data


def answer(letter, data):
    sys.stdout.buffer.write(HEAD.pack(letter, len(data)) + data)
    sys.stdout.buffer.flush()


class Text:
    """A tokenizer, and what stands around a document: what it adds by itself, and the marks of tokenizer_config.json."""

    def load(self, data):
        from tokenizers import Tokenizer
        size, = struct.unpack_from("<Q", data)
        self.tokenizer = Tokenizer.from_str(data[8:8 + size].decode("utf-8"))
        config = json.loads(data[8 + size:].decode("utf-8") or "{}")
        if not isinstance(config, dict):
            raise ValueError("tokenizer_config.json is no JSON object")
        self.tokenizer.no_truncation()  # both may be set in the file; a document is a document
        self.tokenizer.no_padding()
        begin, end = self.mark(config, "bos_token"), self.mark(config, "eos_token")
        self.front = [begin] if begin is not None and config.get("add_bos_token") is True else []
        self.back = [end] if end is not None else []
        self.marks = {begin, end} - {None}
        # What the tokenizer itself puts in front and behind.
        plain = self.tokenizer.encode("a", add_special_tokens=False).ids
        whole = self.tokenizer.encode("a").ids
        at = next((i for i in range(len(whole) - len(plain) + 1) if whole[i:i + len(plain)] == plain), 0)
        own_front, own_back = whole[:at], whole[at + len(plain):]
        bos = (self.front or own_front or [-1])[0]
        eos = (self.back or own_back or [-1])[-1]
        vocabulary = max(self.tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        return json.dumps({"vocabulary": vocabulary, "bos": bos, "eos": eos}).encode()

    def mark(self, config, key):
        name = config.get(key)
        if isinstance(name, dict):
            name = name.get("content")
        if name is None:
            return None
        token = self.tokenizer.token_to_id(name)
        if token is None:
            raise ValueError(f"{key} {name!r} of tokenizer_config.json is not in the vocabulary")
        return token

    def encode(self, data):
        ids = self.tokenizer.encode(data.decode("utf-8")).ids
        if self.front and ids[:1] != self.front:
            ids = self.front + ids
        if self.back and ids[-1:] != self.back:
            ids = ids + self.back
        return array.array("I", ids).tobytes()

    def decode(self, data):
        ids = array.array("I")
        ids.frombytes(data)
        known = [i for i in ids if i not in self.marks and self.tokenizer.id_to_token(i) is not None]
        return self.tokenizer.decode(known, skip_special_tokens=True).encode("utf-8", "replace")


def main():
    text = Text()
    requests = {b"l": text.load, b"e": text.encode, b"d": text.decode}
    while True:
        letter, size = HEAD.unpack(read(HEAD.size))
        data = read(size)
        try:
            result = requests[letter](data)
        except ModuleNotFoundError as error:
            answer(b"m", str(error).encode())
        except BaseException as error:  # tokenizers raises plain Exception, and panics of Rust are none
            answer(b"e", f"{error}".encode("utf-8", "replace"))
        else:
            answer(b"o", result)


main()
