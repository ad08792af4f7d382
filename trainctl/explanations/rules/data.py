"""Rules of sources, stages, filters and samples: TC340 to TC411."""

from __future__ import annotations

from trainctl.explanations.entry import RuleText

TWO = "'data.sources={code: {kind: stdlib, weight: 0.7}, prose: {kind: files, paths: [a.txt]"
"""The beginning of an example with two sources."""
BOTH = f"{TWO}, weight: 0.3}}}}'"
TEXT = {"a.txt": "Some prose.\n" * 2000}

ENTRIES: dict[str, RuleText] = {
    "TC340": RuleText(
        "Shares that do not add up to 1 hide a source that was forgotten or counted twice.",
        "Shares with the sum 1, or whole numbers, which are taken in proportion; or epochs, or "
        "tokens, for each.",
        f"recipe=tiny {TWO}, weight: 0.2}}}}'",
        files=TEXT,
    ),
    "TC341": RuleText(
        "With several sources there is no one text to pass over, and the keys of a single source "
        "are not read.",
        "training.tokens for the whole, and epochs in each source.",
        f"recipe=tiny {BOTH} data.max_bytes=5",
        files=TEXT,
    ),
    "TC342": RuleText(
        "Stages follow each other, each to a point of the run; the last goes to its end.",
        "until (a share), until_step or until_tokens in all but the last, ascending.",
        f"recipe=tiny {BOTH} 'data.stages=[{{until: 0.5}}]'",
        files=TEXT,
    ),
    "TC343": RuleText(
        "A stage changes the weights of sources that exist; a name that none has would be ignored.",
        "Names of data.sources, with weights above 0 that add up.",
        f"recipe=tiny {BOTH} 'data.stages=[{{until: 0.5}}, {{weights: {{cod: 1.0}}}}]'",
        files=TEXT,
    ),
    "TC344": RuleText(
        "A step has as many tokens in every stage. Samples of another length have to fill it "
        "exactly, on every rank.",
        "A length that divides, as the message names.",
        f"recipe=tiny {BOTH} 'data.stages=[{{until: 0.5, sequence_length: 1000}}, {{}}]'",
        files=TEXT,
    ),
    "TC345": RuleText(
        "The run asks a source for more than it may repeat (`max_epochs`), or the source has less "
        "than one sample, or its share comes to nothing.",
        "More text, a smaller weight, or a higher max_epochs.",
        title="A source that cannot give what a run takes of it.",
        situation="At `launch`, and in `data plan`, once the text is tokenized",
        message="prose falls short by 81,920 tokens: the run takes 6.1 passes over its 16,384, and "
        "max_epochs is 4, which are over in step 410",
    ),
    "TC346": RuleText(
        "epochs or tokens of a source were asked for, and the length of the run makes it others.",
        "Another training.tokens, or a weight in place of it.",
        title="A source of which a run takes another number of tokens or epochs than was asked "
        "for.",
        situation="At `launch`, and in `data plan`, once the text is tokenized",
        message="prose is to give 32,768 tokens (epochs=2), and the run of 655,360 takes 49,152 "
        "of it",
    ),
    "TC347": RuleText(
        "A stage with longer samples cuts what is left of an epoch anew; where it does not "
        "divide, a rest of the text is not seen in that epoch.",
        "A length that is a multiple of the one before.",
        title="Text that a longer sequence leaves out of an epoch that has begun.",
        situation="At `launch`, and in `data plan`, with stages of growing length",
        message="300 tokens of prose are left out of its present epoch where the sequence gets "
        "longer",
    ),
    "TC348": RuleText(
        "To know the length of an epoch, files of a source have to be read, and cannot be.",
        "The file that the message names: its path, its permissions, its format.",
        title="A source whose files cannot be read.",
        situation="`data plan`, with a source whose files have gone",
        message="data.sources.prose.paths is empty",
    ),
    "TC349": RuleText(
        "What is compiled, or multiplied in fp8, is made for one length of samples.",
        "kernels.compile=none, or one length in all stages.",
        f"recipe=tiny {BOTH} 'data.stages=[{{until: 0.5, sequence_length: 128}}, {{}}]' "
        "kernels.compile=deepcompile",
        files=TEXT,
    ),
    "TC350": RuleText(
        "A file is trained on by one source and held out by another: the held-out loss would be "
        "that of text the model has seen.",
        "data.decontaminate=[held_out], or the same files held out in both.",
        title="A source that trains on what another source holds out.",
        situation="Two sources that share files, one with a `held_out_fraction` of its own",
        message="data.sources.a trains on book.txt, which data.sources.b holds out",
    ),
    "TC353": RuleText(
        "MinHash finds near copies. Below a likeness of 0.3 the bands that it sorts documents "
        "into hold nearly everything, and what it would drop is not a copy.",
        "0.7 to 0.9.",
        "recipe=tiny data.dedup=minhash data.dedup_threshold=0.1",
    ),
    "TC354": RuleText(
        "Of copies in several sources the one in the first of data.dedup_precedence stays.",
        "Names of data.sources.",
        f"recipe=tiny {BOTH} data.dedup=exact data.dedup_precedence=[prsoe]",
        files=TEXT,
    ),
    "TC355": RuleText(
        "Decontamination against held-out text needs some.",
        "data.held_out_fraction above 0, or data.held_out_paths.",
        "recipe=tiny data.decontaminate=[held_out] data.held_out_fraction=0",
    ),
    "TC356": RuleText(
        "A filter without what it measures with, or with a lowest value above its highest, keeps "
        "everything or nothing.",
        "The key that the message names.",
        "recipe=tiny 'data.filters={words: {}}'",
    ),
    "TC357": RuleText(
        "Copies and passages are looked for in whole documents of text that trainctl reads itself.",
        "Leave data.max_bytes out, or clean the text before it is tokenized.",
        "recipe=tiny data.max_bytes=100 data.dedup=exact",
    ),
    "TC359": RuleText(
        "Rules such as C4's drop lines without a full stop and pages with braces: of programs "
        "that is nearly all.",
        "A source of its own for code, without these filters.",
        title="Filters made for pages of the web, on sources of programs.",
        example="recipe=tiny data=files 'data.paths=[\"src/*.py\"]' 'data.filters={c4: {}}'",
        files={f"src/{name}.py": "print('hello')\n" * 900 for name in "abcd"},
    ),
    "TC360": RuleText(
        "Files of ids (`data.kind=tokens`) carry an index and no tokenizer. An index that does "
        "not fit, or ids beyond the vocabulary, come from another tokenizer or a cut file.",
        "The tokenizer that made them, or make them again.",
        title="A file of ids that does not fit its index, or whose ids are not the tokenizer's.",
        situation="`data=tokens` on a `.bin` file that was cut off",
        message="it is cut off: 4,096 of 8,034 bytes",
    ),
    "TC361": RuleText(
        "Keys about text (its encoding, its length in bytes) say nothing of a source whose files "
        "have ids.",
        "Leave them out; name fewer files to use less.",
        "recipe=tiny 'data.sources={code: {kind: tokens, weight: 0.7, paths: [a.bin], max_bytes: "
        "9}, prose: {kind: files, paths: [a.txt], weight: 0.3}}'",
        files=TEXT,
    ),
    "TC362": RuleText(
        "Best-fit packing fills bins of one length from a table of the whole corpus: stages "
        "cannot shorten them, and a stream of shards has no such table.",
        "data.packing=stream, or one length.",
        f"recipe=tiny {BOTH} 'data.stages=[{{until: 0.5, sequence_length: 128}}, {{}}]' "
        "data.packing=best_fit",
        files=TEXT,
    ),
    "TC363": RuleText(
        "Infilling moves the middle of a document behind its end and marks the three parts by "
        "tokens of their own, which the tokenizer has to have.",
        "A tokenizer with such tokens in data.fim_tokens, or fim_rate=0.",
        "recipe=tiny data.fim_rate=0.5",
    ),
    "TC365": RuleText(
        "A streamed corpus needs an address, and its cache must hold the shards that are drawn "
        "from at once, and those that come next.",
        "data.url, and a larger cache_bytes or fewer shuffle_shards.",
        "recipe=tiny data=stream",
    ),
    "TC366": RuleText(
        "A conversation is what its template makes of it, and is never cut anywhere: a stream of "
        "tokens with separators would be something else.",
        "data.packing=best_fit, and no data.separator.",
        "recipe=tiny data=chat data.paths=[chat.jsonl] data.separator=x",
        files={"chat.jsonl": '{"messages": [{"role": "user", "content": "a"}]}\n'},
    ),
    "TC367": RuleText(
        "Conversations become text by a template, which the tokenizer's directory or the "
        "configuration has.",
        "tokenizer=hf with a directory that has one, or data.chat_template.",
        title="Conversations, and a tokenizer without a chat template.",
        situation="`data=chat` with a tokenizer that has no template",
        message="the tokenizer has no file, and no chat template belongs to it",
    ),
    "TC368": RuleText(
        "Several conversations share a sample. Without a mask each sees those before it, which it "
        "will not when it is used.",
        "data.mask_documents=true.",
        situation="`data=chat data.packing=best_fit data.mask_documents=false`",
        message="data.mask_documents=false: a conversation sees those before it in its sample",
    ),
    "TC369": RuleText(
        "Whoever renders a conversation gives the template its messages, its tools and the "
        "special tokens: given twice, a run would train on something else than the template means.",
        "Only what the template itself asks for, such as enable_thinking.",
        "recipe=tiny data=chat data.paths=[chat.jsonl] data.template_arguments={tools:[]}",
        files={"chat.jsonl": '{"messages": [{"role": "user", "content": "a"}]}\n'},
    ),
    "TC410": RuleText(
        "Without another choice a launch trains on Python's own source files, as bytes: enough to "
        "try trainctl, and nothing that a larger model should learn. Recipes name no corpus, as "
        "yours is not known.",
        "data=files 'data.paths=[...]' (or another source) and tokenizer=hf tokenizer.path=DIR.",
        "recipe=125m",
        title="The corpus or the tokenizer of the demonstration, under a model that is none.",
    ),
    "TC411": RuleText(
        "Up to four passes over a text are worth nearly as much as new text, forty as good as "
        "nothing more (arXiv:2305.16264): the model learns it by heart. Mostly the corpus is "
        "smaller than was thought.",
        "More text, or a shorter run. data.sources.NAME.max_epochs allows a source more.",
        title="More than 50 passes over a corpus.",
        situation="At `launch`, `validate` and `data plan`; 135 B tokens of a text of 11 MB",
        message="the run makes 12,294 passes over the corpus, which has about 10,982,341 tokens to "
        "train on",
    ),
}
