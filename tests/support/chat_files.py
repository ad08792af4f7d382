"""Small tokenizer with a chat template in transformers' format, and examples of templates."""

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

MARKED = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}"
    "{% for call in message.tool_calls or [] %}<call>{{ call.function | tojson }}</call>"
    "{% endfor %}<|im_end|>{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ message['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML template that marks the assistant's text and the token that ends its turn."""

UNMARKED = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
"""ChatML template without the marks."""

FORGETFUL = UNMARKED.replace(
    "{% if message['role'] == 'assistant' %}",
    "{% if message['role'] == 'assistant' %}{% if loop.last %}<think></think>{% endif %}",
)
"""Template that formats the last answer differently from earlier ones."""

SPECIAL = ("<s>", "<|im_start|>", "<|im_end|>", "<pad>")


def write_tokenizer(
    folder: Path,
    template: str | None = MARKED,
    *,
    adds_bos: bool = False,
    words: Sequence[str] = (),
    special: bool = True,
) -> Path:
    """Write a tokenizer of bytes and a few special tokens, as transformers saves a fast tokenizer.

    Args:
        template: Chat template; None writes none.
        adds_bos: Whether the tokenizer itself puts `<s>` before each text.
        words: Vocabulary in place of bytes, in addition to digits and white space.
        special: Whether the file marks its special tokens as special.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if words:
        vocabulary = ["<unk>", *words, *string.digits, " ", "\n"]
        numbers = {word: number for number, word in enumerate(vocabulary)}
        backend = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\d|\s|[a-z]+|\W"), "isolated")
        backend.decoder = decoders.Fuse()
    else:
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
    if special:
        backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    else:
        backend.add_tokens([AddedToken(token, special=False) for token in SPECIAL])
    if adds_bos:
        from tokenizers.processors import TemplateProcessing

        bos = ("<s>", backend.token_to_id("<s>"))
        backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[bos])
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "<|im_end|>",
        "pad_token": "<pad>",
        **({} if template is None else {"chat_template": template}),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def asked(*turns: tuple[str, str], system: str = "") -> list[dict[str, str]]:
    """Return the messages of questions with their answers."""
    messages = [{"role": "system", "content": system}] if system else []
    for question, answer in turns:
        messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    return messages
