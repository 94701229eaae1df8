"""The options of each command."""

from __future__ import annotations

from npurt.cli.options import FILE, FOLDER, NUMBER, SIZE, SWITCH, TEXT, WHOLE, Option
from npurt.config import TrainConfig
from npurt.progress import STYLES

_C = TrainConfig()

BUNDLE = Option("bundle", FILE, "Bundle to run: an .npub file or an OCI layout folder.", required=True)
TRUST = Option(
    "trust",
    FILE,
    "Public key that the bundle must be signed with, or a trust policy; may be given again.",
    default=(),
    shown_default="the default trust policy",
    many=True,
)
WEIGHTS = Option(
    "weights", FOLDER, "Model folder: safetensors, config.json, tokenizer.json, chat template.", required=True
)
DEVICE = Option(
    "device",
    TEXT,
    "Device to run on: cpu, rngd-sim, furiosa:N or furiosa:auto; 'auto' is what the bundle was built for.",
    default="auto",
)
PREPACK = Option(
    "prepack",
    TEXT,
    "Keep frozen weights in the processor's own layout: faster, about twice the memory. 'auto' decides by the length "
    "of the run.",
    default=_C.prepack,
    choices=("on", "off", "auto"),
)
THREADS = Option("threads", WHOLE, "Threads of the CPU device.", shown_default="the cores this process may use")
TEMPLATE = Option(
    "template",
    TEXT,
    "How {prompt, response} rows are rendered: with the model's chat template, as plain text, or by what there is.",
    default=_C.template,
    choices=("auto", "chat", "plain"),
)
LOSS_ON = Option(
    "loss-on", TEXT, "Learn what the assistant says, or every token.", default=_C.loss_on, choices=("response", "all")
)
OVERLONG = Option(
    "overlong",
    TEXT,
    "Rows longer than the bundle's sequences: cut them, leave them out, or stop.",
    default=_C.overlong,
    choices=("cut", "drop", "error"),
)
PACK = Option("pack", SWITCH, "Put several rows into one sequence, unseen by each other.", default=_C.pack)
PROGRESS = Option("progress", TEXT, "How progress is shown on standard error.", default="auto", choices=STYLES)
JSON = Option("json", SWITCH, "Print JSON on standard output, and errors as JSON on standard error.", default=False)

_BOUND = (BUNDLE, TRUST, WEIGHTS, DEVICE, PREPACK, THREADS)
_ROWS = (TEMPLATE, LOSS_ON, OVERLONG, PACK)
_OUTPUT = (PROGRESS, JSON)

TRAIN: dict[str, tuple[Option, ...]] = {
    "What to train": (
        BUNDLE,
        TRUST,
        WEIGHTS,
        Option("data", FILE, "Training data, JSON Lines; may be given again.", default=(), many=True, required=True),
        Option("eval-data", FILE, "Held-out data to evaluate on; may be given again.", default=(), many=True),
        Option(
            "out",
            FOLDER,
            "Folder for the adapter, or for model/ in full fine-tuning, and for checkpoints.",
            required=True,
            unless="dry_run",
        ),
        Option("init-adapter", FOLDER, "PEFT adapter to start from.", shown_default="a new one, drawn from --seed"),
    ),
    "How long and how fast": (
        Option("steps", WHOLE, "Optimizer steps."),
        Option("epochs", NUMBER, "Passes over the data, in place of --steps.", shown_default="1 without --steps"),
        Option("accum", WHOLE, "Sequences per optimizer step (gradient accumulation).", default=_C.accum),
        Option("lr", NUMBER, "Peak learning rate.", default=_C.lr),
        Option("warmup", NUMBER, "Steps of linear warm-up; below 1, a share of all steps.", default=_C.warmup),
        Option(
            "schedule",
            TEXT,
            "Learning rate after the warm-up.",
            default=_C.schedule,
            choices=("constant", "linear", "cosine"),
        ),
        Option("min-lr-ratio", NUMBER, "Where the schedule ends, as a share of --lr.", default=_C.min_lr_ratio),
    ),
    "Optimizer": (
        Option("weight-decay", NUMBER, "AdamW's decoupled weight decay.", default=_C.weight_decay),
        Option("beta1", NUMBER, "Decay of AdamW's first moment.", default=_C.beta1),
        Option("beta2", NUMBER, "Decay of AdamW's second moment.", default=_C.beta2),
        Option("eps", NUMBER, "AdamW's epsilon.", default=_C.eps),
        Option(
            "grad-clip",
            NUMBER,
            "Global L2 norm to which gradients are scaled down; 0 for none.",
            default=_C.max_norm,
            field="max_norm",
        ),
        Option("seed", WHOLE, "Seed of the initial adapter and the order of the data.", default=_C.seed),
    ),
    "Data": (
        *_ROWS,
        Option("shuffle", SWITCH, "A new order of sequences in each epoch, drawn from --seed.", default=_C.shuffle),
    ),
    "Watching and saving": (
        Option("eval-every", WHOLE, "Steps between evaluations; 0: after the last only.", default=_C.eval_every),
        Option("save-every", WHOLE, "Steps between checkpoints; 0: on SIGINT and SIGTERM only.", default=_C.save_every),
        Option("keep-checkpoints", WHOLE, "How many of the newest checkpoints stay.", default=_C.keep_checkpoints),
        Option("log-file", FILE, "File that gets one JSON object per event; runs are appended."),
        Option("log-every", WHOLE, "Steps per line of plain progress.", default=_C.log_every),
        Option(
            "overwrite",
            SWITCH,
            "Delete the checkpoints that another run left in --out.",
            default=False,
            from_flag_only=True,
        ),
        Option("dry-run", SWITCH, "Show counts and the first row, and stop.", default=False, from_flag_only=True),
    ),
    "Running": (DEVICE, PREPACK, THREADS, *_OUTPUT),
}

EVAL: dict[str, tuple[Option, ...]] = {
    "What to evaluate": (
        *_BOUND[:3],
        Option(
            "data", FILE, "Data to evaluate on, JSON Lines; may be given again.", default=(), many=True, required=True
        ),
        Option("adapter", FOLDER, "PEFT adapter to evaluate.", shown_default="none: the base model"),
    ),
    "Data": _ROWS,
    "Running": (*_BOUND[3:], *_OUTPUT),
}

CHECK: dict[str, tuple[Option, ...]] = {
    "What to check": (
        *_BOUND[:3],
        Option("layers", WHOLE, "Decoder layers to check, from the first; fewer are quicker.", default=2),
        Option(
            "data",
            FILE,
            "Rows whose first sequence is run, JSON Lines; may be given again.",
            default=(),
            shown_default="random tokens",
            many=True,
        ),
        Option("seed", WHOLE, "Seed of the random tokens and LoRA matrices.", default=0),
    ),
    "Running": (DEVICE, *_OUTPUT),
}

MERGE: dict[str, tuple[Option, ...]] = {
    "What to merge": (
        Option("weights", FOLDER, "Model folder that the adapter was trained for.", required=True),
        Option("adapter", FOLDER, "PEFT adapter to merge: LoRA or rsLoRA, of any rank and targets.", required=True),
        Option("out", FOLDER, "New folder for the merged model.", required=True),
    ),
    "What to write": (
        Option(
            "dtype",
            TEXT,
            "Dtype of all floating-point tensors.",
            shown_default="that of each tensor",
            choices=("float32", "float16", "bfloat16"),
        ),
        Option(
            "max-shard-size",
            SIZE,
            "Largest file of weights, such as 5GB; a single larger tensor has a file of its own.",
            shown_default="the files of the base model",
        ),
    ),
    "Running": _OUTPUT,
}

VERIFY: dict[str, tuple[Option, ...]] = {"Options": (TRUST, JSON)}
DOCTOR: dict[str, tuple[Option, ...]] = {"Options": (JSON,)}
