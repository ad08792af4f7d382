"""Small corpus with every case that preparation must handle; identical each time it is written."""

import json
import random

BY_FILE = {"held_out_by": "file"}
"""Split of corpora whose digests were recorded before records were held out."""
CONFIGS = {
    "files": {"paths": ["a/*.txt"], **BY_FILE},
    "mixed": {"paths": ["a/*.txt", "b/big.jsonl"], "held_out_fraction": 0.2, **BY_FILE},
    "single": {"paths": ["b/big.jsonl"], "held_out_fraction": 0.1},
    "whole": {"paths": ["one.txt"], "held_out_fraction": 0.1},
    "named": {"paths": ["a", "b/big.jsonl"], "held_out_paths": ["a/0*.txt"]},
    "skip": {"paths": ["b/*.jsonl"], "on_bad_text": "skip", "held_out_fraction": 0.5, **BY_FILE},
    "skip_single": {"paths": ["b/bad.jsonl"], "on_bad_text": "skip"},
    "cut": {"paths": ["a/*.txt"], "max_bytes": 5000, **BY_FILE},
    "none": {"paths": ["b/big.jsonl", "a"], "held_out_fraction": 0.0},
}
"""Configurations that read the corpus, by keys of `data=files`."""

_WORDS = ["alpha", "beta", "gamma", "delta", "é", "漢字", "", "\n", "", "fn(", ")", "{x}", "0123"]


def make_texts(root):
    """Write text, JSONL with empty lines, and JSONL with all kinds of bad lines."""
    chance = random.Random(7)

    def text(count):
        return " ".join(chance.choice(_WORDS) for _ in range(count))

    (root / "a").mkdir(parents=True)
    (root / "b").mkdir()
    for index in range(30):
        (root / "a" / f"{index:02}.txt").write_text(text(chance.randrange(0, 400)))
    (root / "a" / "empty.txt").write_text("")
    with (root / "b" / "big.jsonl").open("w") as stream:
        for index in range(300):
            record = {"text": text(chance.randrange(0, 80)), "n": index}
            stream.write(json.dumps(record) + "\n" + ("\n" if index % 17 == 0 else ""))
    with (root / "b" / "bad.jsonl").open("wb") as stream:
        for index in range(120):
            good = json.dumps({"text": text(10)}).encode()
            if index % 13 == 5:
                stream.write(b'{"text": "\\ud800 x"}\n')
            elif index % 29 == 3:
                stream.write(b'{"body": "x"}\n')
            elif index % 31 == 3:
                stream.write(b'{"text": "a\xff"}\n')
            else:
                stream.write(good + b"\r\n")
    (root / "one.txt").write_text(text(3000))
