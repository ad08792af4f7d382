"""Hidden tokens: their shares, and what they are a function of."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from rank_processes import tiny_config
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import BertProcessing

from trainctl.data.sample_reader import TokenMasking, token_masking
from trainctl.data.tokenizer import FileTokenizer, encode_documents
from trainctl.errors import TrainctlError
from trainctl.options.tokenizer.byte import MASK

SAMPLES, LENGTH = 64, 512


def hidden(
    masking: TokenMasking, indices: range, *, epoch: int = 0, length: int = LENGTH
) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens after masking, and where they were hidden; every token was 7."""
    tokens = np.full((len(indices), length), 7)
    can_hide = np.ones(tokens.shape, dtype=bool)
    can_hide[:, ::5] = False
    found = masking.apply(tokens, can_hide, np.array(indices), np.full(len(indices), epoch))
    assert not found[:, ::5].any()
    assert (tokens[~found] == 7).all()
    return tokens, found


@pytest.fixture
def masking() -> TokenMasking:
    found = token_masking(tiny_config(objective__kind="masked"), "code")
    assert found is not None
    return found


def test_hidden_tokens_have_their_shares(masking: TokenMasking) -> None:
    tokens, found = hidden(masking, range(SAMPLES))
    count = found.sum()
    assert count / (found.size * 0.8) == pytest.approx(0.15, abs=0.01)
    assert (tokens[found] == MASK).sum() / count == pytest.approx(0.8, abs=0.02)
    assert (tokens[found] == 7).sum() / count == pytest.approx(0.1, abs=0.02)
    others = tokens[found & (tokens != MASK) & (tokens != 7)]
    assert others.min() < 20 and 237 < others.max() <= 256
    everything = replace(masking, rate=1.0, mask_share=0.0, random_share=0.0)
    tokens, found = hidden(everything, range(2))
    assert found.sum() == 2 * (LENGTH - LENGTH // 5 - 1) and (tokens == 7).all()


def test_they_are_a_function_of_the_sample_alone(masking: TokenMasking) -> None:
    together, _ = hidden(masking, range(SAMPLES))
    backward, _ = hidden(masking, range(SAMPLES)[::-1])
    assert (together == backward[::-1]).all()
    shorter, _ = hidden(masking, range(3, 4), length=100)
    assert (together[3:4, :100] == shorter).all()
    others = [
        hidden(masking, range(SAMPLES), epoch=1)[0],
        hidden(masking, range(1, SAMPLES + 1))[0],
        hidden(token_masking(tiny_config(objective__kind="masked"), "text"), range(SAMPLES))[0],
        hidden(token_masking(tiny_config(objective__kind="masked", seed=8), "code"), range(64))[0],
    ]
    for other in others:
        assert (together != other).mean() == pytest.approx(0.19, abs=0.02)


def test_held_out_samples_hide_the_same_tokens_with_every_seed() -> None:
    of_seed = [
        token_masking(tiny_config(objective__kind="masked", seed=seed), "code", held_out=True)
        for seed in (7, 8)
    ]
    assert (hidden(of_seed[0], range(8))[0] == hidden(of_seed[1], range(8))[0]).all()


def test_the_mask_token_is_the_tokenizers(tmp_path) -> None:
    assert token_masking(tiny_config(), "code") is None
    with pytest.raises(TrainctlError, match=r"objective.mask_token=<x>: the tokenizer has no such"):
        token_masking(tiny_config(objective__kind="masked", objective__mask_token="<x>"), "code")
    words = '"vocab": {"a": 0, "[SEP]": 1, "?": 2%s}'
    vocabulary = '{"model": {"type": "WordLevel", "unk_token": "a", ' + words + "}}"
    of_file = {"tokenizer__kind": "file", "tokenizer__path": str(tmp_path / "tokenizer.json")}
    for more, settings, expected in (
        (', "[MASK]": 3', "{}", 3),
        (', "[MASK]": 3', '{"mask_token": {"content": "?"}}', 2),
    ):
        (tmp_path / "tokenizer.json").write_text(vocabulary % more)
        (tmp_path / "tokenizer_config.json").write_text(settings)
        found = token_masking(tiny_config(objective__kind="masked", **of_file), "code")
        assert found is not None and (found.mask_token, found.vocab_size) == (expected, 4)
    (tmp_path / "tokenizer.json").write_text(vocabulary % "")
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(TrainctlError, match="mask_token=null: the tokenizer has no such token"):
        token_masking(tiny_config(objective__kind="masked", **of_file), "code")


def test_documents_begin_with_the_token_that_the_tokenizer_puts_first(tmp_path) -> None:
    """`[CLS]` and `[SEP]`, as transformers gives a text to a BERT; neither is hidden."""
    backend = Tokenizer(WordLevel({"[CLS]": 0, "[SEP]": 1, "[MASK]": 2, "a": 3, "b": 4}, "b"))
    backend.pre_tokenizer = Whitespace()
    file, of_file = tmp_path / "tokenizer.json", []
    for _ in range(2):
        backend.save(str(file))
        tokenizer = FileTokenizer(file)
        of_file.append(tokenizer)
        backend.post_processor = BertProcessing(("[SEP]", 1), ("[CLS]", 0))
    plain, framed = (
        [ids.tolist() for *_, ids in encode_documents([(0, "a b")], t)] for t in of_file
    )
    assert (plain, framed) == ([[3, 4, 1]], [[0, 3, 4, 1]])
    assert framed[0] == of_file[1].encode_sequence("a b").tolist()
    assert of_file[0].fingerprint != of_file[1].fingerprint
    of = {"tokenizer__kind": "file", "tokenizer__path": str(file), "objective__rate": 1.0}
    masking = token_masking(tiny_config(objective__kind="masked", **of), "code")
    tokens = np.array([[0, 3, 4, 3]])
    found = masking.apply(tokens, np.ones((1, 4), dtype=bool), np.zeros(1, int), np.zeros(1, int))
    assert found.tolist() == [[False, True, True, True]] and tokens[0, 0] == 0
