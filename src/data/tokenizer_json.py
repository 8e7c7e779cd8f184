# Encodes and decodes with a Hugging Face tokenizer.json for tokenizer_json.cpp, over standard input and output.
# A request is a letter, a length of 8 bytes and that many bytes; an answer the same, its letter one of
# o (the result), e (an error, as text), b (what is wrong with a conversation), t (with its template) and m (the name of a
# package that is missing). Ends with its input.
import sys

sys.path[:] = [folder for folder in sys.path if folder]  # not the working folder's modules, which python -c puts first

import array  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import re  # noqa: E402
import struct  # noqa: E402

HEAD = struct.Struct("<cQ")
ANSWERS = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)  # where anything else prints


def read(count):
    data = sys.stdin.buffer.read(count)
    if len(data) < count:
        sys.exit(0)
    return data


def answer(letter, data):
    ANSWERS.write(HEAD.pack(letter, len(data)) + data)
    ANSWERS.flush()


class BadConversation(Exception):
    pass


class BadTemplate(Exception):
    pass


class Text:
    """A tokenizer, and what stands around a document: what it adds by itself, and the marks of tokenizer_config.json."""
    chat = None  # transformers' tokenizer, once there was a conversation

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

    def conversation(self, data):
        """Tokens of a conversation by the chat template, and which of them are learnt: what the assistant says, the completion of a
        prompt, or all. As in TRL's SFTTrainer, a completion begins where prompt and whole part."""
        size, = struct.unpack_from("<Q", data)
        chat = self.chat_of(os.fsdecode(data[8:8 + size]))
        request = json.loads(data[8 + size:].decode("utf-8"))
        given = request.get("chat_template_kwargs") or {}
        if not isinstance(given, dict):
            raise BadConversation("\"chat_template_kwargs\" that are no object")
        given = {"tools": request.get("tools"), **given}

        def tokens_of(messages, **more):
            import jinja2
            try:
                return chat.apply_chat_template(messages, tokenize=True, return_dict=True, **given, **more)
            except (jinja2.TemplateError, TypeError, KeyError, AttributeError, ValueError) as error:
                raise BadConversation(f"a conversation that the chat template refuses ({error})") from None

        everything = request["all"]
        if "messages" in request:
            messages = request["messages"]
            says = [message for message in messages if message["role"] == "assistant"]
            if everything and any(message.get("weight", 1) != 1 for message in messages):
                raise BadConversation("weights of messages, where all tokens are learnt (data.train_on = \"all\")")
            if everything:
                ids = tokens_of(messages)["input_ids"]
                mask = [1] * len(ids)
            elif not says:
                raise BadConversation("a conversation without a message of the assistant")
            elif not re.search(r"\{%-?\s*generation\s*-?%\}", chat.get_chat_template()):
                raise BadTemplate("a chat template without {% generation %} marks")
            else:
                made = tokens_of(messages, return_assistant_tokens_mask=True)
                ids, mask = made["input_ids"], list(made["assistant_masks"])
                runs = [i for i, bit in enumerate(mask) if bit and not (i and mask[i - 1])]
                weights = [message.get("weight", 1) for message in says]
                if any(weight != 1 for weight in weights):
                    if len(runs) != len(says):
                        raise BadConversation(f"{len(says)} messages of the assistant with weights, of which the template makes "
                                              f"{len(runs)} runs of tokens")
                    for start, weight in zip(runs, weights):
                        while start < len(mask) and mask[start]:
                            mask[start] = weight
                            start += 1
        else:
            ids = tokens_of(request["prompt"] + request["completion"])["input_ids"]
            prompt = tokens_of(request["prompt"], add_generation_prompt=True)["input_ids"]
            begin = next((i for i, (one, other) in enumerate(zip(prompt, ids)) if one != other), min(len(prompt), len(ids)))
            mask = [int(everything or i >= begin) for i in range(len(ids))]
        return array.array("I", ids).tobytes() + array.array("f", mask).tobytes()

    def chat_of(self, folder):
        if self.chat is None:
            os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"
            os.environ["TRANSFORMERS_VERBOSITY"] = "error"
            from transformers import AutoTokenizer
            self.chat = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            if not self.chat.chat_template:
                self.chat = None
                raise BadTemplate("no chat template")
        return self.chat

    def decode(self, data):
        ids = array.array("I")
        ids.frombytes(data)
        known = [i for i in ids if i not in self.marks and self.tokenizer.id_to_token(i) is not None]
        return self.tokenizer.decode(known, skip_special_tokens=True).encode("utf-8", "replace")


def main():
    text = Text()
    requests = {b"l": text.load, b"e": text.encode, b"d": text.decode, b"c": text.conversation}
    while True:
        letter, size = HEAD.unpack(read(HEAD.size))
        data = read(size)
        try:
            result = requests[letter](data)
        except ModuleNotFoundError as error:
            answer(b"m", (error.name or str(error)).encode())
        except BadConversation as error:
            answer(b"b", f"{error}".encode("utf-8", "replace"))
        except BadTemplate as error:
            answer(b"t", f"{error}".encode())
        except BaseException as error:  # tokenizers raises plain Exception, and panics of Rust are none
            answer(b"e", f"{error}".encode("utf-8", "replace"))
        else:
            answer(b"o", result)


main()
