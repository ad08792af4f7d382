"""Search for keys, options, explained words and pages of the documentation by keywords."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache

from trainctl.config.catalog import list_options_in, search_folders
from trainctl.config.keys import Leaf, leaves, option_leaves, part_leaves
from trainctl.config.registry import list_kinds
from trainctl.config.schema import GROUPS, LIST_GROUPS
from trainctl.config.suggest import OTHER_NAMES, words
from trainctl.rules.handbook import Meaning, all_meanings, docs_folder, plain_text

KEY, OPTION, PAGE = "key", "option", "page"
REFERENCE = "reference"
MOST_KEYS, MOST_PAGES = 6, 3
_IGNORED = frozenset(words("a an and by do for how i in is my of on or per set the to what with"))
_SHORT = {"lr": ("learning", "rate")}
"""Words that an abbreviation in a text stands for."""
_SAME = {"gpu": "device", "k8": "kubernetes"}
"""Words that mean the same in a text and in a question, without the s of a plural."""
_GENERATED = (REFERENCE, "rules", "imported-keys", "index", "api")
"""Pages that are made of what is searched itself, or that only list pages."""


def find_by_keywords(phrase: str) -> list[Meaning]:
    """Return the keys, options, explained words and pages with all words of a phrase, the best of
    each kind first; those with all but one of three or more words if none has all.
    """
    wanted = {_SAME.get(word, word) for word in _own_stems(phrase)} - _IGNORED
    for lacking in (0, 1) if len(wanted) > 2 else (0,):
        named = _best(_named_things(), wanted, lacking, phrase)[:MOST_KEYS]
        pages: dict[str, Meaning] = {}
        for each in _best(_page_sections(), wanted, lacking, phrase):
            pages.setdefault(each.page, each)
        if named or pages:
            return [*named, *list(pages.values())[:MOST_PAGES]]
    return []


Found = tuple[Meaning, str, str]
"""A thing with its heading, which counts more, and its text."""


def _best(things: Iterable[Found], wanted: set[str], lacking: int, phrase: str) -> list[Meaning]:
    """Return the things that have the wanted words in heading or text, the best first."""
    scored = []
    for order, (found, heading, text) in enumerate(things):
        in_heading = wanted & _stems(heading)
        if wanted and len(wanted - in_heading - _stems(text)) <= lacking:
            often = min(5, min(text.lower().count(word) for word in wanted))
            is_other = found.word != phrase
            scored.append((is_other, -len(in_heading), -often, len(heading), order, found))
    return [found for *_, found in sorted(scored, key=lambda each: each[:-1])]


def _own_stems(text: str) -> set[str]:
    """Return the words of a text in lower case, without the s of a plural."""
    return {word.removesuffix("s") for word in re.findall("[a-z0-9]+", text.lower())}


@cache
def _stems(text: str) -> frozenset[str]:
    """Return the words of a text, with those that they stand for."""
    found = _own_stems(text)
    more = {word for short in found & _SHORT.keys() for word in _SHORT[short]}
    return frozenset(found | more | {_SAME[word] for word in found & _SAME.keys()})


def _named_things() -> Iterator[Found]:
    """Yield each key, option and explained word."""
    others: dict[str, str] = {}
    for other, key in OTHER_NAMES.items():
        others[key] = f"{others.get(key, '')} {other}"
    for key, leaf, heading in _all_keys():
        doc = leaf.metadata["doc"]
        meaning = Meaning(word=key, kind=KEY, page=REFERENCE, meaning=doc, heading=heading)
        yield meaning, f"{key} {others.get(key, '')}", doc
    for group in (*GROUPS, *LIST_GROUPS):
        for info in list_options_in(search_folders(None), group):
            word = f"{group}=[{info.name}]" if group in LIST_GROUPS else f"{group}={info.name}"
            about = info.summary
            found = Meaning(word=word, kind=OPTION, page=REFERENCE, meaning=about, heading=group)
            yield found, word, about
    for each in all_meanings():
        yield each, each.word, each.meaning


def _all_keys() -> Iterator[tuple[str, Leaf, str]]:
    """Yield each key with the heading of its table in the reference."""
    for key, leaf in leaves().items():
        section = key.rpartition(".")[0] and key.partition(".")[0]
        yield key, leaf, section or "Top level"
        inside = {f"{key}.NAME": part_leaves(leaf.part)} if leaf.part else {}
        group = leaf.metadata.get("each")
        kinds = list_kinds(group) if group else ()
        inside |= {f"{key}.{name}": option_leaves(group, name) for name in kinds}
        for above, keys in inside.items():
            yield from ((f"{above}.{name}", each, above) for name, each in keys.items())


def _page_sections() -> Iterator[Found]:
    """Yield each section of the pages that are written by hand, and a page's beginning."""
    for path in sorted(docs_folder().glob("*.md")):
        if path.stem in _GENERATED:
            continue
        title, *sections = re.split(r"^##+ ", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        title = title.removeprefix("# ")
        name = title.partition("\n")[0]
        for text in (title, *sections):
            heading, _, body = text.partition("\n")
            full = name if text is title else f"{name}: {heading}"
            first = next(filter(None, map(_first_sentence, re.split(r"\n\s*\n", body))), "")
            found = Meaning(
                word=full, kind=PAGE, page=path.stem, meaning=first, heading=heading.strip()
            )
            yield found, full, body


def _first_sentence(paragraph: str) -> str:
    """Return the first sentence of a paragraph of prose; empty for anything else."""
    if not re.match(r"[A-Z*\[]|`(?!``)", paragraph.strip()):
        return ""
    text = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", plain_text(paragraph.strip()))
    return re.split(r"(?<=[.:])\s", text.replace("**", ""), maxsplit=1)[0]
