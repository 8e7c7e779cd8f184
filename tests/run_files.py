"""The files that a small run reads: a configuration, documents, videos."""
import json


def merged(tables, more):
    return {table: {**tables.get(table, {}), **more.get(table, {})} for table in {**tables, **more}}


def text_tables(packs, micro_batch, length, sizes, **more):
    """A decoder on the documents in {folder}/text. sizes: hidden, layers, heads, key_value_heads, head_dim, feed_forward.

    peak_tflops: to measure the peak takes longer than such a run, and fails on a machine that is busy.
    """
    model = dict(zip(("hidden", "layers", "heads", "key_value_heads", "head_dim", "feed_forward"), sizes))
    return merged({"run": {"directory": "{folder}/run", "peak_tflops": 1},
                   "data": {"text": ["{folder}/text"], "cache": "{folder}/cache", "pack_length": length},
                   "batch": {"packs_per_step": packs, "packs_per_micro_batch": micro_batch}, "model": model}, more)


def write_run(path, tables, **more):
    """`tables`, {table: {key: value}}, and `more` of them as TOML; "{folder}" in a value is path's folder."""
    path.write_text("".join(f"[{table}]\n" + "".join(
        f"{key} = {json.dumps(value)}\n".replace("{folder}", str(path.parent)) for key, value in keys.items())
        for table, keys in merged(tables, more).items()))
    return path


def write_documents(folder, count, text=lambda i: "abc " * (3 + 7 * i % 23)):
    """Documents of different lengths in {folder}/text."""
    (folder / "text").mkdir()
    for i in range(count):
        (folder / f"text/{i:02}.txt").write_text(f"document {i}: {text(i)}")


def counting(i):
    return " ".join(map(str, range(10 * i)))


def write_video(path, frames, rows, columns, seed):
    """Uncompressed (YUV4MPEG2): a gradient that moves."""
    data = f"YUV4MPEG2 W{columns} H{rows} F8:1 Ip A1:1 C444\n".encode()
    for frame in range(frames):
        data += b"FRAME\n" + bytes((7 * x + 5 * y + 3 * frame + 11 * seed + 40 * plane) % 256
                                   for plane in range(3) for y in range(rows) for x in range(columns))
    path.write_bytes(data)
