"""Turns tyro's error box about wrong flags into one sentence."""

import re

from trainmark.errors import unknown

ALIASES = {
    "lr": "learning-rate base-lr max-lr peak-lr",
    "global-batch": "batch-size train-batch-size global-batch-size total-batch-size bs",
    "micro-batch": "batch-size micro-batch-size per-device-batch-size per-device-train-batch-size",
    "accumulate": "gradient-accumulation-steps accumulation-steps accumulate-grad-batches",
    "eval-batch": "eval-batch-size valid-batch-size test-batch-size per-device-eval-batch-size",
    "epochs": "num-epochs num-train-epochs max-epochs n-epochs",
    "max-steps": "steps num-steps train-steps train-iters max-iters iterations",
    "output": "output-dir output-path output-folder out-dir save-dir save-path log-dir",
    "data": "data-dir data-path dataset dataset-path dataset-dir train-data input",
    "input": "data data-path data-dir input-path input-file input-dir",
    "from": "init-from pretrained load load-from resume resume-from-checkpoint checkpoint",
    "seed": "random-seed manual-seed random-state",
    "precision": "dtype mixed-precision amp",
    "log-every": "log-interval logging-steps log-freq print-freq",
    "checkpoint-every": "save-steps save-interval save-every checkpoint-interval",
    "evals-per-epoch": "eval-steps eval-every eval-interval",
    "schedule.warmup-steps": "warmup num-warmup-steps lr-warmup-steps warmup-iters",
    "optimizer.name": "optimizer optim opt",
    "model.embedding-dim": "embedding-size embed-dim emb-dim embedding-width",
    "format": "output-format export-format",
    "columns": "schema column-types",
    "frequency-threshold": "min-count min-frequency min-freq",
}
"""Our flags, each with the names that other systems have for it."""


def sentence(box: str, prog: str, known: frozenset[str] = frozenset()) -> str:
    """The text of tyro's error box: its first section, and the nearest flag if it names one.

    Names that other systems have for a flag in `known`, all of the verb's, are told first.

    The box has a frame where the terminal can show one, and rules of hyphens where it cannot.
    """
    sections: list[str] = [""]
    for line in box.splitlines():
        text = line.strip("│╭╮╰╯ ")
        if line.startswith("╭") or (text and set(text) <= {"─", "-"}):
            sections.append("")
        else:
            sections[-1] += f" {text}"
    if not box.startswith("╭"):
        sections[0] = ""  # the title
    message, *others = [" ".join(section.split()) for section in sections if section.strip()]
    message = _missing(box) or _choice_expected(message) or _number_expected(message)
    hint = _hint_of_aliases(message, known)
    near = re.search(r"(?:similar to .*?|Perhaps you meant): (--[\w.-]+)", " ".join(others))
    if near and not hint:
        hint = f" Did you mean {near.group(1)}?"
    return f"{message.rstrip('.')}.{hint} See 'trainmark {prog} --help'."


def flags_in(help_text: str) -> frozenset[str]:
    """The flags that tyro's help lists, each at the beginning of a line."""
    return frozenset(re.findall(r"^[│\s]*(--[\w.-]+)", help_text, re.MULTILINE))


def _hint_of_aliases(message: str, known: frozenset[str]) -> str:
    if not message.startswith("Unrecognized"):
        return ""
    received = dict.fromkeys(re.findall(r"(?<!\S)--[\w.-]+", message))
    meant = {flag: found for flag in received if (found := _ours(flag, known))}
    if len(meant) == 1:
        (names,) = meant.values()
        return f" Did you mean {' or '.join(names)}?"
    return "".join(f" For {flag} say {' or '.join(names)}." for flag, names in meant.items())


def _ours(flag: str, known: frozenset[str]) -> list[str]:
    """What a flag of another system is called here, among the flags that a verb knows."""
    word = flag.partition("=")[0].lstrip("-").replace("_", "-").lower()
    meant = (f"--{name}" for name, theirs in ALIASES.items() if word in theirs.split())
    return [name for name in meant if name in known]


def _missing(box: str) -> str | None:
    """The flags that tyro misses, each with its help text, which is indented further."""
    lines = [line.rstrip("│ ") for line in box.splitlines()]
    depths = [len(line) - len(line.lstrip("│ ")) for line in lines]
    title = next((n for n, line in enumerate(lines) if "Missing from" in line), None)
    if title is None:
        return None
    flags: list[str] = []
    helps: list[str] = []
    for line, depth in zip(lines[title + 1 :], depths[title + 1 :], strict=True):
        if depth <= depths[title]:
            break
        text = line.strip("│ ")
        if depth > depths[title] + 4 and flags:
            helps[-1] += f" {text}"
        elif flags and not helps[-1]:  # of a long line, in a narrow terminal
            flags[-1] += f" {text}"
        else:
            flags.append(text)
            helps.append("")
    told = (h.replace("(required)", "").strip(" .") for h in helps)
    wanted = " and ".join(f"{flag} ({text})" for flag, text in zip(flags, told, strict=True))
    return f"{lines[title].strip('│ ')} {wanted}"


def _choice_expected(message: str) -> str | None:
    """A misspelt choice, with the choices in order: tyro's come from a set, and None is among them
    where a flag may be left out."""
    found = re.match(
        r"invalid choice '(.*)' for argument '(.+)'\. Expected one of \((.*)\)", message
    )
    if found is None:
        return None
    received, flag, choices = found.groups()
    known = sorted(set(re.findall(r"'([^']+)'", choices)) - {"None"})
    return str(unknown(flag, received, known))


def _number_expected(message: str) -> str:
    """Python's words for a number that is none, as a sentence; any other message as it is."""
    found = re.match(r"Error parsing (--[\w.-]+): .*(with base 10|to float): ('.*')", message)
    if found is None:
        return message
    flag, kind, received = found.groups()
    expected = "a whole number" if kind == "with base 10" else "a number"
    return f"{flag} must be {expected}. Received: {received}"
