"""Best-fit packing: assigns pieces of documents to samples so that few documents are cut.

Documents up to the length of a sample stay whole. Longer ones are cut into whole samples and a
remainder. Remainders and short documents go into bins of a sample's length by *best-fit
decreasing*: the longest first, each into the bin with the least sufficient room (Ding et al. 2024,
arXiv:2404.10830). Every token is in exactly one bin. The rest of a bin is padding without a loss.

Lengths are small integers, so pieces of one length are placed together, and bins are indexed by
remaining room. No bin has to be searched for; the cost is one sort. Bins are computed once for a
split of a corpus and a length, and cached:

    packing-KEY/starts.bin    u64: first token of each piece in the split's text, bin after bin
    packing-KEY/lengths.bin   u32: tokens of each piece
    packing-KEY/firsts.bin    u64: number of each bin's first piece, and the number of pieces
    packing-KEY/packing.json  settings that the bins depend on, sizes and CRC-32; written last
"""

from __future__ import annotations

import json
import secrets
import shutil
from bisect import bisect_left, insort
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainctl.config.schema import OnTooLong, Packing, RunConfig
from trainctl.data.cache_files import (
    cache_folder,
    convert_write_errors,
    crc32_of,
    ignore_message,
    lock_folder,
    map_array,
    write_synced,
)
from trainctl.data.corpus_record import Corpus, Split
from trainctl.data.token_arrays import LossMask
from trainctl.errors import TrainctlError
from trainctl.options.data import SampleKind, spec_of
from trainctl.readers.files import digest_of
from trainctl.readers.remote import Notify
from trainctl.runs.files import sync_directory, write_json

Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Pieces:
    """Pieces of documents to pack, in the order of the text."""

    starts: Array
    """Position of each piece's first token in the text."""
    lengths: Array
    """Tokens of each piece, from 1 to the length of a sample."""


@dataclass(frozen=True, slots=True)
class Bins:
    """Assignment of pieces to samples: bin i is sample i."""

    starts: Array
    """Position of each piece's first token in the text, bin after bin."""
    lengths: Array
    firsts: Array
    """Index of each bin's first piece, and the total number of pieces, (bins + 1,)."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Numbers of conversations packed, cut and left out; empty for other texts."""

    def __len__(self) -> int:
        return len(self.firsts) - 1

    def pieces(self, number: int) -> tuple[list[int], list[int]]:
        """Return starts and lengths of a bin's pieces, in the order of the text."""
        place = slice(int(self.firsts[number]), int(self.firsts[number + 1]))
        return self.starts[place].tolist(), self.lengths[place].tolist()

    def bin_of(self, token: int) -> int | None:
        """Return the bin that contains a token of the text. All pieces are searched.

        None if the token belongs to a conversation that was left out, or to a part that was cut
        off.
        """
        found = np.flatnonzero((self.starts <= token) & (token < self.starts + self.lengths))
        if not len(found):
            return None
        whole = found[self.starts[found].argmin()]  # not the piece beside another record's prompt
        return int(np.searchsorted(self.firsts, whole, side="right")) - 1


def document_pieces(ends: npt.NDArray[np.integer], length: int) -> Pieces:
    """Return documents as pieces; longer documents become pieces of `length` and a remainder.

    `ends` has the end (exclusive) of each document; empty documents have no piece.
    """
    ends = ends.astype(np.int64)
    begins = np.concatenate([[0], ends[:-1]])[: len(ends)].astype(np.int64)
    counts = -(-(ends - begins) // length)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = np.repeat(begins, counts) + number * length
    return Pieces(starts, np.minimum(np.repeat(ends, counts) - starts, length))


def conversation_pieces(
    ends: npt.NDArray[np.integer], length: int, loss_mask: LossMask, *, cuts: bool
) -> tuple[Pieces, dict[str, int]]:
    """Return each kept conversation as one piece, and the numbers of those cut and left out.

    Conversations that are too long are cut to their beginning, or left out. A cut conversation is
    left out too if no token of its beginning has a loss. So is a conversation that its template
    could not render, which has no token.

    Args:
        cuts: Whether to keep the beginning of conversations that are too long.
    """
    ends = ends.astype(np.int64)
    starts = np.concatenate([[0], ends[:-1]])[: len(ends)].astype(np.int64)
    lengths = ends - starts
    long = np.flatnonzero(lengths > length)
    left = [bool(loss_mask[s + 1 : s + length + 1].any()) for s in starts[long].tolist() if cuts]
    stays = lengths > 0
    stays[long] = left if cuts else False
    counts = {
        "conversations": len(ends),
        "cut": sum(left),
        "dropped_too_long": 0 if cuts else len(long),
        "dropped_nothing_left": len(left) - sum(left),
        "dropped_unwritten": int((lengths == 0).sum()),
    }
    return Pieces(starts[stays], np.minimum(lengths[stays], length)), counts


def answer_bins(
    ends: npt.NDArray[np.integer], length: int, loss_mask: LossMask
) -> tuple[Bins, dict[str, int]]:
    """Return a bin for each single answer, and the numbers of those packed and left out.

    A bin has the answer after its prompt, then the same prompt and the answer of the record before
    (of the last one for the first). So which two are together depends on the corpus alone.
    """
    ends = ends.astype(np.int64)
    starts = np.concatenate([[0], ends[:-1]])[: len(ends)].astype(np.int64)
    is_there = ends > starts
    starts, lengths = starts[is_there], (ends - starts)[is_there]
    prompts = np.array(
        [loss_mask[s : s + n].argmax() for s, n in zip(starts, lengths, strict=True)], np.int64
    )
    others = np.roll(starts + prompts, 1), np.roll(lengths - prompts, 1)
    stays = lengths + prompts + others[1] <= length
    bins = Bins(
        np.stack([starts, starts, others[0]], axis=1)[stays].flatten(),
        np.stack([lengths, prompts, others[1]], axis=1)[stays].flatten(),
        np.arange(stays.sum() + 1, dtype=np.int64) * 3,
    )
    counts = {
        "conversations": len(ends),
        "cut": 0,
        "dropped_too_long": int((~stays).sum()),
        "dropped_nothing_left": 0,
        "dropped_unwritten": int((~is_there).sum()),
    }
    return bins, counts


def pack_pieces(pieces: Pieces, length: int) -> Bins:
    """Pack by best-fit decreasing. The result depends only on the lengths; the cost is one sort."""
    order = np.argsort(-pieces.lengths, kind="stable")
    bin_of = np.empty(len(order), dtype=np.int64)
    placed = count = 0
    rooms = _BinsByFreeSpace()
    of_length = np.bincount(pieces.lengths, minlength=length + 1).tolist()
    for size in range(length, 0, -1):
        left = of_length[size]
        while left:
            # A bin that has taken a piece has the least room, so it is next again.
            room = rooms.least(size)
            each = (room or length) // size
            wanted = -(-left // each)
            if room:
                bins = rooms.take(room, wanted)
            else:
                room, bins = length, np.arange(count, count + wanted)
                count += wanted
            taken = min(left, len(bins) * each)
            whole, rest = divmod(taken, each)
            bin_of[placed : placed + taken] = np.repeat(bins, each)[:taken]
            rooms.add(room - each * size, bins[:whole])
            rooms.add(room - rest * size, bins[whole:])
            placed, left = placed + taken, left - taken
    by_bin = np.lexsort((order, bin_of))
    firsts = np.concatenate([[0], np.cumsum(np.bincount(bin_of, minlength=count))])
    chosen = order[by_bin]
    return Bins(pieces.starts[chosen], pieces.lengths[chosen], firsts.astype(np.int64))


class _BinsByFreeSpace:
    def __init__(self) -> None:
        self._bins: dict[int, list[Array]] = {}
        self._rooms: list[int] = []

    def add(self, room: int, bins: Array) -> None:
        """Add bins with this room; full bins are dropped."""
        if room and len(bins):
            if room not in self._bins:
                insort(self._rooms, room)
                self._bins[room] = []
            self._bins[room].append(bins)

    def least(self, size: int) -> int:
        """Return the smallest room of at least `size`; 0 if there is none."""
        place = bisect_left(self._rooms, size)
        return self._rooms[place] if place < len(self._rooms) else 0

    def take(self, room: int, most: int) -> Array:
        """Remove and return up to `most` bins with this room, at least one."""
        runs = self._bins[room]
        bins, rest = runs[-1][:most], runs[-1][most:]
        if len(rest):
            runs[-1] = rest
        else:
            runs.pop()
        if not runs:
            del self._bins[room]
            self._rooms.remove(room)
        return bins


FORMAT = 1
_TYPES = {"starts": "<u8", "lengths": "<u4", "firsts": "<u8"}


def load_bins(
    config: RunConfig, corpus: Corpus, split: Split, notify: Notify = ignore_message
) -> Bins | None:
    """Return the bins of a split for a run, from the cache or newly packed.

    None if the run does not pack, or the split is empty. `notify` is called with a sentence before
    waiting for another process, and if the cached bins are damaged.

    Raises:
        TrainctlError: The cache cannot be written (exit code 4), or a conversation is too long and
            `data.on_too_long=error`.
    """
    if config.data.packing is Packing.stream or not split.tokens:
        return None
    length, cache = longest_record(config), cache_folder()
    of = {
        "format": FORMAT,
        "digest": corpus.digest,
        "side": "train" if split == corpus.train else "held_out",
        "length": length,
        **({"on_too_long": config.data.on_too_long.value} if corpus.is_marked else {}),
        **({"each": "alone"} if _has_records(config) else {}),
    }
    folder = cache / f"packing-{digest_of(json.dumps(of, sort_keys=True))[:24]}"
    bins, _ = _read_bins(folder)
    if bins is None:
        with lock_folder(folder, notify):
            bins, problem = _read_bins(folder)
            if bins is None:
                if problem:
                    notify(f"{folder} is damaged ({problem}): packing the documents again")
                _write_bins(folder, _pack_split(config, corpus, split), of)
                bins, problem = _read_bins(folder)
                assert bins is not None, problem
    return bins


def longest_record(config: RunConfig) -> int:
    """Return the most tokens that a sample has of the corpus: of prompts, without their answers."""
    most = getattr(config.objective, "max_prompt_tokens", config.training.sequence_length)
    return min(most, config.training.sequence_length)


def _has_records(config: RunConfig) -> bool:
    """Return True if each sample is one record, which is not packed with others."""
    return spec_of(config.data).gives is not SampleKind.text


def _pack_split(config: RunConfig, corpus: Corpus, split: Split) -> Bins:
    length, ends = longest_record(config), corpus.ends(split)
    loss_mask = corpus.loss_mask(split)
    if loss_mask is None:
        return pack_pieces(document_pieces(ends, length), length)
    is_record, is_error = _has_records(config), config.data.on_too_long is OnTooLong.error
    what, others = ("record", "") if is_record else ("conversation", "cut, or ")
    if spec_of(config.data).gives is SampleKind.answers:
        bins, counts = answer_bins(ends, length, loss_mask)
        problem = f"{counts['dropped_too_long']:,} records are longer than a sample with the answer"
        problem += " of another record"
    else:
        cuts = config.data.on_too_long is OnTooLong.cut
        pieces, counts = conversation_pieces(ends, length, loss_mask, cuts=cuts)
        if is_record:  # each piece is a bin
            bins = Bins(pieces.starts, pieces.lengths, np.arange(len(pieces.starts) + 1))
        else:
            bins = pack_pieces(pieces, length)
        longest = int(np.diff(ends.astype(np.int64), prepend=0).max(initial=0))
        problem = f"a {what} has {longest:,} tokens"
    if is_error and counts["dropped_too_long"]:
        raise TrainctlError(
            f"{problem}, and {_length_key(config)} is {length:,}",
            hint=f"a longer sequence; or data.on_too_long={others}drop, which leaves such out",
        )
    return replace(bins, counts=counts)


def packed_token_count(config: RunConfig, corpus: Corpus, notify: Notify = ignore_message) -> int:
    """Return the tokens of a source's training text as a run draws it, including bins' padding.

    The order computes floor((N - 1) / L) samples of length L from this number N. `notify` is called
    as in `load_bins`, and with how much of the samples is text.

    Raises:
        TrainctlError: As `load_bins`; or every conversation is too long, and left out.
    """
    bins = load_bins(config, corpus, corpus.train, notify)
    if bins is None:
        return corpus.train.tokens
    if not len(bins) and corpus.is_marked:
        _require_fitting(config, corpus, bins)
    tokens = len(bins) * config.training.sequence_length
    is_record = _has_records(config)
    if bins.counts:
        text = describe_packing(bins.counts, corpus.held_out.documents)
        notify(text.replace("conversations", "records", 1) if is_record else text)
    text_tokens = int(bins.lengths.sum(dtype=np.int64))
    how = "a record in each sample" if is_record else "best-fit packing"
    notify(
        f"{how}: {len(bins):,} samples of {config.training.sequence_length:,} tokens, "
        f"{text_tokens / max(1, tokens):.2%} of them text, the rest padding"
    )
    return tokens + 1


def _require_fitting(config: RunConfig, corpus: Corpus, bins: Bins) -> None:
    """Refuse conversations of which none fits into a sample.

    Raises:
        TrainctlError: All are left out as too long; with the length that takes all of them.
    """
    what = "records" if _has_records(config) else "conversations"
    if not bins.counts["dropped_too_long"] + bins.counts["dropped_nothing_left"]:
        return
    ends = corpus.ends(corpus.train).astype(np.int64)
    longest = int(np.diff(ends, prepend=0).max())
    key = _length_key(config)
    drops = config.data.on_too_long is OnTooLong.drop and what == "conversations"
    told = describe_packing(bins.counts, corpus.held_out.documents).partition("; ")[2]
    raise TrainctlError(
        f"no {what} are left to train on at {key}={longest_record(config):,}: {told}",
        hint=f"a larger {key}: the longest of them has {longest:,} tokens"
        + ("; or data.on_too_long=cut, which keeps their beginnings" if drops else ""),
    )


def _length_key(config: RunConfig) -> str:
    """Return the key of the most tokens that a sample has of the corpus."""
    is_prompt = longest_record(config) < config.training.sequence_length
    return "objective.max_prompt_tokens" if is_prompt else "training.sequence_length"


def describe_packing(counts: Mapping[str, int], held_out: int) -> str:
    """Describe how many conversations are trained on, held out, cut and left out."""
    reasons = {
        "cut": "cut at the length of a sample",
        "dropped_too_long": "left out, as longer than a sample",
        "dropped_nothing_left": "left out, as nothing to learn is left where they are cut",
        "dropped_unwritten": "left out, as they cannot be encoded",
    }
    parts = [f"{counts[reason]:,} {what}" for reason, what in reasons.items() if counts[reason]]
    splits = f"{counts['conversations']:,} conversations to train on, {held_out:,} held out"
    return "; ".join([splits, *parts])


def _write_bins(folder: Path, bins: Bins, of: dict[str, Any]) -> None:
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    try:
        with convert_write_errors(folder):
            temporary.mkdir(parents=True)
            files = {}
            for name, dtype in _TYPES.items():
                raw = getattr(bins, name).astype(dtype).tobytes()
                size, checksum = write_synced(temporary / f"{name}.bin", raw)
                files[name] = {"bytes": size, "crc32": checksum}
            record = {**of, "files": files, "counts": bins.counts}
            write_json(temporary / "packing.json", record)
            sync_directory(temporary)
            shutil.rmtree(folder, ignore_errors=True)
            temporary.rename(folder)
            sync_directory(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _read_bins(folder: Path) -> tuple[Bins | None, str]:
    """Return the bins of a folder if they are intact, else None and the problem, if any."""
    record = folder / "packing.json"
    if not record.is_file():
        return None, ""
    arrays = {}
    try:
        manifest = json.loads(record.read_bytes())
        files, counts = manifest["files"], manifest.get("counts", {})
        for name, dtype in _TYPES.items():
            path = folder / f"{name}.bin"
            if path.stat().st_size != files[name]["bytes"]:
                return None, f"{path.name} has {path.stat().st_size:,} bytes"
            if crc32_of(path) != files[name]["crc32"]:
                return None, f"{path.name} has another checksum"
            arrays[name] = map_array(path, dtype)
    except OSError as error:
        return None, f"{error.filename}: {error.strerror}"
    except (ValueError, TypeError, KeyError):
        return None, "packing.json is none"
    return Bins(**arrays, counts=counts), ""
