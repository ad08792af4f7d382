"""Rules of input: overrides, YAML, directories: TC100 to TC119, TC138 to TC159, TC450."""

from __future__ import annotations

from trainctl.explanations.entry import RuleText

LLAMA = (
    '{"model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,'
    ' "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 1024}'
)

ENTRIES: dict[str, RuleText] = {
    "TC045": RuleText(
        "A run is described by its attempts; `config.yaml` is there to be read. An edit of it "
        "changes nothing, and a reader would be misled.",
        "Leave the file as it was, and give the change to `trainctl resume RUN KEY=VALUE`.",
        title="A run's `config.yaml` that was edited by hand, and that nobody reads any more.",
        situation="`trainctl resume runs/mine` after an edit of `runs/mine/config.yaml`",
        message="runs/mine/config.yaml was edited after the run was made, which has no effect: "
        "optimizer.lr 0.001 -> 0.01",
    ),
    "TC046": RuleText(
        "What stands for a run is its last attempt that trained. One that failed before its first "
        "step may have been a mistake, so what it changed is not taken over.",
        "Repeat the overrides that you want to keep; the message lists them.",
        title="Attempts that failed before their first step: what they changed is left out.",
        situation="`trainctl resume runs/mine` after a resume with a wrong override",
        message="attempt 2 failed before its first step, and what it changed is left out: "
        "training.micro_batch_size 4 -> 64",
    ),
    "TC100": RuleText(
        "Keys of other tools are understood where they mean one thing only, and the true name is "
        "said.",
        "The name that the message gives.",
        title="An override that uses another name for a key.",
        example="recipe=tiny data.sequence_length=128",
    ),
    "TC101": RuleText(
        "A key that nobody reads is a typing mistake, or of another version. It is refused rather "
        "than ignored.",
        "The nearest key, which the message names; `trainctl config show` lists all.",
        title="A key that the schema does not have.",
        example="recipe=tiny optimizer.lrate=1e-4",
    ),
    "TC102": RuleText(
        "Each key has a type. YAML reads `1e-4` as text and `no` as false; trainctl says so "
        "instead of training with it.",
        "A value of the type that the message names.",
        title="A value that is not of its key's type.",
        example="recipe=tiny training.steps=many",
    ),
    "TC103": RuleText(
        "The value has the right type and cannot be meant.",
        "A value inside the range that the message and the reference give.",
        title="A number outside its key's range.",
        example="recipe=tiny optimizer.lr=-1",
    ),
    "TC104": RuleText(
        "`_target_` and its like let a configuration file run any code. Code of yours comes in by "
        "keys that name it openly: script, trainer, model.factory, data.factory.",
        "The key for your kind of code.",
        title="A construct of Hydra's that is refused, such as `_target_`.",
        example="recipe=mine",
        files={
            "recipes/mine.yaml": "defaults:\n  - tiny\n  - _self_\nmodel:\n  _target_: os.system\n"
        },
    ),
    "TC105": RuleText(
        "Mostly a tab, a missing space after a colon, or a bracket that is never closed.",
        "The line that the message names.",
        title="A YAML file that cannot be read.",
        example="recipe=mine",
        files={"recipes/mine.yaml": "defaults:\n  - tiny\noptimizer: {lr: 1e-4\n"},
    ),
    "TC106": RuleText(
        "Your folder comes first, so a file with the name of a shipped one takes its place, also "
        "where a recipe names it.",
        "Another name, if you want both; nothing, if it is meant.",
        title="A file of the user's that hides another of the same name.",
        example="recipe=tiny",
        files={"conf/optimizer/adamw.yaml": "kind: adamw\nlr: 1.0e-3\n"},
    ),
    "TC107": RuleText(
        "Options and recipes end in .yaml.",
        "Rename it.",
        title="A file that is not read, for its ending.",
        example="recipe=tiny",
        files={"conf/optimizer/mine.yml": "kind: adamw\n"},
    ),
    "TC108": RuleText(
        "A group has the options that are shipped and those in `conf/GROUP/` of your folder.",
        "One of the listed ones.",
        title="An option that its group does not have.",
        example="recipe=tiny optimizer=adamm",
    ),
    "TC109": RuleText(
        "Recipes are the shipped ones and those in `recipes/` of the folder you work in, or of "
        "`--config-dir`.",
        "`trainctl recipes` lists them.",
        title="A recipe that does not exist.",
        example="recipe=tny",
    ),
    "TC110": RuleText(
        "Overrides are KEY=VALUE, GROUP=OPTION, +KEY=VALUE and ~KEY. What a shell has eaten "
        "(brackets, spaces, quotes) no longer is.",
        "Quotes around the whole word: 'data.paths=[a, b]'.",
        title="An override that does not follow their grammar.",
        example="recipe=tiny 'data.paths=[a'",
    ),
    "TC111": RuleText(
        "The same key twice on one line: the later one wins, and the first was typed for a reason.",
        "Keep one.",
        title="An override that a later one replaces.",
        example="recipe=tiny training.steps=100 training.steps=200",
    ),
    "TC112": RuleText(
        "What a model's directory says and what the configuration says of the same thing cannot "
        "both hold; or the key is one of another option of the group.",
        "Leave out the one that is not meant; the message says which won.",
        title="A setting without effect, for what the model's directory says.",
        example="recipe=tiny model=hf model.path=m model.hidden_size=128",
        files={"m/config.json": LLAMA},
    ),
    "TC420": RuleText(
        "Choosing another option of a group replaces the whole section, also what the recipe set "
        "in it: a learning rate for AdamW is not one for Lion. What is thereby gone is listed, so "
        "that nobody loses a warmup without a word.",
        "The overrides of the hint keep the recipe's values; leave them out if the option's are "
        "meant.",
        title="Values of a recipe that an option of the command line replaces.",
        example="recipe=7b-zero3 schedule=linear",
    ),
    "TC421": RuleText(
        "Some keys say the same thing in other units: the length of a run in steps, tokens or "
        "epochs, a batch in sequences or tokens, a warmup in steps, tokens or a share. Of these "
        "the one set last holds, file after file and then the command line, and takes back the "
        "others.",
        "Keep one where a file, or the command line, sets two; else nothing: the message says "
        "what holds.",
        title="Two keys that say the same thing: the one set later holds.",
        example="recipe=tiny training.steps=100 training.epochs=2",
    ),
    "TC113": RuleText(
        "model.path names a directory that transformers wrote, which has a config.json. An "
        "address on a hub is not looked up.",
        "Download it first, and name the directory.",
        title="A model's directory that cannot be read.",
        example="recipe=tiny model=hf model.path=nowhere",
    ),
    "TC114": RuleText(
        "The shape of the model is read from config.json, and something of it is missing.",
        "A whole config.json, as save_pretrained writes it.",
        title="A model's directory that does not give its shape.",
        example="recipe=tiny model=hf model.path=m",
        files={"m/config.json": '{"model_type": "llama", "vocab_size": 512}'},
    ),
    "TC115": RuleText(
        "A path with a typing mistake, or relative to another folder.",
        "A path that is there; relative ones begin in the folder that you start from.",
        title="A file that the configuration names and that is not there.",
        example="recipe=tiny data=files data.paths=[nowhere.txt]",
    ),
    "TC116": RuleText(
        "The script is started on every rank, and is not there or cannot be run.",
        "A path from the folder that you start from.",
        title="A script of the user's that is not there.",
        example="recipe=tiny script=nowhere.py",
    ),
    "TC117": RuleText(
        "`module:function` is looked up without running it: in the folder, in PYTHONPATH, among "
        "what is installed.",
        "The module's name as an import would have it, and a function that it defines.",
        title="A function of the user's that cannot be found.",
        example="recipe=tiny data.factory=mine:texts",
    ),
    "TC118": RuleText(
        "script and trainer each take the place of trainctl's trainer, and arguments need a "
        "script.",
        "Keep one of the two.",
        title="Settings of a script or a function of the user's that do not go together.",
        example="recipe=tiny script=train.py trainer=train:main",
        files={"train.py": "def main():\n    pass\n"},
    ),
    "TC119": RuleText(
        "trainctl's trainer would act on the setting; your program has to read it from the plan, "
        "and nobody can see from here whether it does.",
        "Read TRAINCTL_PLAN, or leave the setting out.",
        title="A setting that a script or a function of the user's has to apply itself.",
        situation="`script=train.py training.evaluate_every_steps=100`",
        message="training.evaluate_every_steps has no effect by itself: trainctl's trainer would "
        "act on it",
    ),
    "TC138": RuleText(
        "By its first bytes the file is an archive, a picture or a program, or it ends before it "
        "is whole. Read as text it would be noise.",
        "Unpack or convert it, or leave it out of data.paths.",
        title="A file of the corpus that is not of its kind, cut off or damaged: it is not read.",
        example="recipe=tiny data=files data.paths=[a.txt]",
        files={"a.txt": "\x7fELF" + "\x00" * 9000},
    ),
    "TC139": RuleText(
        "Of JSON lines and tables the text is under data.text_key (`text`). Here it has another "
        "name.",
        "data.text_key=NAME; the message lists the names that are there.",
        title="A file without a text under `data.text_key`: in its first lines, or no such column.",
        example="recipe=tiny data=files data.paths=[a.jsonl]",
        files={"a.jsonl": '{"content": "some text"}\n' * 900},
    ),
    "TC140": RuleText(
        "Of a folder only files are read that end in what usually has text.",
        "A pattern such as 'FOLDER/**/*.rst', which reads what it names.",
        title="A folder of the corpus without a text, or with files that are left out.",
        example="recipe=tiny data=files data.paths=[texts]",
        files={"texts/a.rst": "Some text.\n" * 2000},
    ),
    "TC141": RuleText(
        "What is held out is chosen by documents or files: a small corpus has too little of them "
        "for a sample, or one large file is half of it.",
        "More or smaller files, a larger data.held_out_fraction, or a shorter sequence.",
        title="A side of the corpus without a sample, or with much more text than was asked for.",
        example="recipe=tiny data=files data.paths=[a.txt]",
        files={"a.txt": "Too little.\n"},
    ),
    "TC142": RuleText(
        "A file in another encoding, or a line that was cut. data.on_bad_text says whether it "
        "stops the run, is replaced, or is left out.",
        "Convert it (iconv -t utf-8), or data.on_bad_text=skip.",
        title="Text at the beginning of a file that is not UTF-8, or a line that is not JSON.",
        example="recipe=tiny data=files data.paths=[a.jsonl]",
        files={"a.jsonl": '{"text": "whole"}\n{"text": "cut off\n' + '{"text": "whole"}\n' * 900},
    ),
    "TC145": RuleText(
        "model.weights=pretrained asks for weights, and the directory has none, or only pickled "
        "ones, which could run code.",
        "Convert them to safetensors with save_pretrained, or model.weights=random.",
        title="A model's directory without weights that can be read, where they are asked for.",
        example="recipe=tiny model=hf model.path=m model.weights=pretrained",
        files={"m/config.json": LLAMA},
    ),
    "TC146": RuleText(
        "transformers builds this architecture from config.json alone: a key of the configuration "
        "would be planned with and not built.",
        "Change it in a copy of the directory.",
        title="A key of the model that its directory decides, and that would not be applied.",
        situation="A directory of phi3 with `model.num_layers=2`",
        message="model.num_layers=2, and m/config.json has 4: transformers builds this "
        "architecture from that file alone",
    ),
    "TC147": RuleText(
        "What has no closed form is counted by building it without memory and tracing a step, in "
        "a process of its own. Its code fails there.",
        "The error in the message is that of the model's code; a newer transformers may help.",
        title="A model that has no closed form and cannot be traced.",
        situation="A directory whose code needs a package that is missing",
        message="the model of m cannot be read by its code: No module named 'einops'",
    ),
    "TC148": RuleText(
        "Names or shapes of the tensors are not those of the model: configuration and weights of "
        "two different models.",
        "Weights and config.json from one directory.",
        title="Weights of a directory that are not those of its model.",
        situation="`model.initial_weights=DIR` with weights of a wider model",
        message="the weights of m are not llama's: 24 tensors have other shapes",
    ),
    "TC149": RuleText(
        "Tensors that the model has no place for: mostly a head of another task, or a vision "
        "part. They are left out.",
        "Nothing, if that is meant; else the model that has them.",
        title="Weights of a directory that its model has no place for.",
        situation="`model.initial_weights=DIR` with more tensors than the model has",
        message="2 tensors of m have no place in llama and are left out: vision.proj.weight",
    ),
    "TC150": RuleText(
        "Parameters, gradients, optimizer states, activations and logits together, at the fullest "
        "moment of a step, are more than the device has. The run would end with CUDA out of "
        "memory, mostly in the second step.",
        "What the lines under the message propose: a higher zero_stage, a smaller micro-batch, "
        "activation_checkpointing=full, kernels.cross_entropy=chunked, offload, more devices. "
        "`trainctl plan` searches all of them; `--force` starts it all the same.",
        title="The plan does not fit into a device's memory.",
        example="recipe=7b-zero3 hardware=1xrtx-4090-24g",
    ),
    "TC151": RuleText(
        "Offloaded states, pinned buffers, the processes themselves and the checkpoint being "
        "written share the memory of the machine.",
        "Fewer ranks on a host, offload to NVMe, or a machine with more.",
        title="The plan does not fit into a node's memory.",
        example="recipe=7b-zero3 hardware=1xh100-80g offload=cpu-all "
        "hardware.host_memory_bytes=68719476736",
    ),
    "TC152": RuleText(
        "States on NVMe need their room there, beside what other runs have left.",
        "A larger drive, or fewer states on it.",
        title="The plan does not fit onto a node's NVMe.",
        example="recipe=7b-zero3 hardware=1xh100-80g offload=nvme offload.nvme_path=/local_nvme "
        "hardware.nvme_bytes=1073741824",
    ),
    "TC154": RuleText(
        "Between two documents comes the token that ends one. Without it the model sees them as "
        "one text.",
        "eos_token in the tokenizer's tokenizer_config.json.",
        title="A tokenizer without a token that ends a document: they follow each other unmarked.",
        situation="`tokenizer=file` with a tokenizer.json without special tokens",
        message="the tokenizer has no end-of-document token: documents follow each other without a "
        "mark",
    ),
    "TC156": RuleText(
        "tokenizer.json is cut, or of a form that the tokenizers library does not read.",
        "Download or train it again.",
        title="A tokenizer's file that is malformed.",
        example="recipe=tiny tokenizer=file tokenizer.path=tokenizer.json",
        files={"tokenizer.json": "{"},
    ),
    "TC157": RuleText(
        "Ids beyond the embedding fail; ids of another tokenizer train a model that knows other "
        "words under them.",
        "The tokenizer that belongs to the model.",
        title="A tokenizer whose ids are not those of the model.",
        situation="`model.path=DIR` with weights, and the tokenizer of bytes",
        message="the weights of m know its own tokenizer's ids, and text becomes bytes",
    ),
    "TC158": RuleText(
        "`trainctl plan` searches layouts that share the global batch evenly, and none of them "
        "does.",
        "The next global batch that the message names.",
        title="A global batch that the ranks of no layout can share, of those that are searched.",
        situation="`trainctl plan` for 6 devices with a global batch of 7",
        message="training.global_batch_size=7 cannot be shared by the ranks of any layout that is "
        "left: the nearest takes multiples of 2",
    ),
    "TC159": RuleText(
        "Also with ZeRO 3, recomputation and offload a device would need more than it has.",
        "More or larger devices, or a smaller model.",
        title="No layout of a model fits the hardware, as far as `trainctl plan` searches.",
        situation="`trainctl plan model=llama-70b hardware=1xt4-16g`",
        message="no layout of llama-70b fits the devices of 1xt4-16g",
    ),
    "TC450": RuleText(
        "`architectures` in config.json, its sections, or the head among the weights say that the "
        "directory is of a classifier, a reward model or a vision-language model. Its body would "
        "train as a language model, with a head that was never trained.",
        "A directory of the language model, or its body saved as one.",
        title="A directory of another task than predicting the next token.",
        example="recipe=tiny model=hf model.path=m",
        files={
            "m/config.json": '{"architectures": ["LlamaForSequenceClassification"], '
            + LLAMA.removeprefix("{")
        },
    ),
}
