"""From words on the command line to a run and its options; wrong ones become one sentence."""

import contextlib
import dataclasses
import inspect
import io
import itertools
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import tyro

from trainmark.config import AnyRun, Run, with_file
from trainmark.errors import InputError, raise_all
from trainmark.validation import problems
from trainmark.verbs.flag_errors import flags_in, sentence

T = TypeVar("T")

NUMBERS = re.compile(r"\s*[\d_.e+-]+(\s*,\s*[\d_.e+-]+)+\s*,?\s*")
"""Numbers with commas between them."""


def parse_run(verb: str, arguments: list[str], options_kind: type[T]) -> tuple[Run, T]:
    """RUN and its flags: named run < --config file < flags."""
    from trainmark import workloads  # a quarter of a second, which verbs without a run do not need

    name, rest = first_word(verb, "RUN", arguments, list(workloads.named_runs()))
    if (Path(name) / "config.json").is_file():
        raise InputError(
            f"{name} is the folder of a run; {verb} takes the name of one. 'trainmark replay "
            f"{name}' prints the command that made it, and 'trainmark {verb} NAME --config "
            f"{Path(name) / 'config.json'}' takes its settings."
        )
    cfg = workloads.named_run(name)
    rest = _in_our_words(list(_paired_flags(rest)), type(cfg), options_kind)
    config = _flag_value(rest, "--config")
    if config is not None:
        data = _flag_value(rest, "--data")
        cfg = with_file(cfg, Path(config), partial(_on_data, data))

    @dataclass(frozen=True, kw_only=True)
    class Arguments:
        # First, so that `--help` shows the verb's own flags before the many of a run.
        options: Annotated[options_kind, tyro.conf.arg(name="")]  # type: ignore[valid-type]
        run: Annotated[type(cfg), tyro.conf.arg(name="")]  # type: ignore[valid-type]

    default = Arguments(run=cfg, options=options_kind())
    about = f"{first_line(workloads.named_runs()[cfg.name])}. {inspect.getdoc(options_kind)}"
    parsed = parse(Arguments, rest, f"{verb} {name}", default, about)
    raise_all(problems(parsed.options))  # those of the run: when it is resolved
    return parsed.run, parsed.options


def _on_data(data: str | None, run: AnyRun) -> AnyRun:
    """A finished run's settings, for other data."""
    if data in (None, run.data):
        return run
    from trainmark import workloads

    return workloads.definition(run).on_other_data(run, data)


def parse(
    kind: type[T],
    arguments: list[str],
    prog: str,
    default: T | None = None,
    description: str | None = None,
) -> T:
    """Let tyro parse the flags; its error box becomes one sentence."""
    if default is None:
        arguments = _in_our_words(arguments, kind)
    errors = io.StringIO()
    options: dict[str, Any] = {} if default is None else {"default": default}
    try:
        with contextlib.redirect_stderr(errors):
            parsed: T = tyro.cli(
                kind, args=arguments, prog=f"trainmark {prog}", description=description, **options
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        known = flags_of(kind, options)
        raise InputError(sentence(errors.getvalue(), prog, known)) from None
    if default is None:
        raise_all(problems(parsed))
    return parsed


def flags_of(kind: type[Any], options: dict[str, Any]) -> frozenset[str]:
    """The flags of a verb, as its help lists them."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        tyro.cli(kind, args=["--help"], **options)
    return flags_in(text.getvalue())


def first_word(
    verb: str, what: str, arguments: list[str], known: list[str]
) -> tuple[str, list[str]]:
    """The word after the verb."""
    if arguments and arguments[0] in ("-h", "--help"):
        print(f"usage: trainmark {verb} {what} [FLAGS]\n")
        print(f"{what} is one of: {', '.join(known)}")
        print(f"\ntrainmark {verb} {known[0]} --help shows the flags.")
        raise SystemExit(0)
    if not arguments or arguments[0].startswith("-"):
        raise InputError(f"'trainmark {verb}' needs {what}, one of: {', '.join(known)}.")
    return arguments[0], arguments[1:]


def split_at(words: Collection[str], arguments: list[str]) -> tuple[list[str], list[str]]:
    """The arguments before the first of these words, and those from it on."""
    places = (place for place, argument in enumerate(arguments) if argument in words)
    place = next(places, len(arguments))
    return arguments[:place], arguments[place:]


def without_flags(arguments: list[str], names: tuple[str, ...]) -> list[str]:
    """The arguments without some flags and their values: all words up to the next flag."""
    kept, skip = [], False
    for argument in arguments:
        if argument.startswith("--"):
            skip = argument.partition("=")[0].replace("_", "-") in names
        if not skip:
            kept.append(argument)
    return kept


def take_words(arguments: list[str], names: tuple[str, ...]) -> tuple[dict[str, Any], list[str]]:
    """Take out flags whose value is itself a line of flags. Returns these values by the names of
    their fields, and the other arguments."""
    taken, rest, words = {}, [], iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if name not in names:
            rest.append(word)
        elif equals:
            taken[_field(name)] = value
        elif (following := next(words, None)) is not None:
            taken[_field(name)] = following
        else:
            raise InputError(f"{name} needs flags as one word, such as {name} '--precision fp32'.")
    return taken, rest


def _field(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def number_lists(kind: type[Any], prefix: str = "--") -> frozenset[str]:
    """The flags of a dataclass, and of those in it, that take several numbers."""
    found: set[str] = set()
    marked = get_type_hints(kind, include_extras=True)
    for name, hint in get_type_hints(kind).items():
        flag = f"{prefix}{name.replace('_', '-')}"
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            # tyro.conf.arg(name=""): its flags are without its name.
            marks = getattr(marked[name], "__metadata__", ())
            is_nameless = any(getattr(mark, "name", None) == "" for mark in marks)
            found |= number_lists(hint, prefix if is_nameless else f"{flag}.")
        elif any(_is_number_list(part) for part in (hint, *get_args(hint))):
            found.add(flag)
    return frozenset(found)


def _is_number_list(hint: Any) -> bool:
    return get_origin(hint) is tuple and not {str, Path} & set(get_args(hint))


def _in_our_words(arguments: list[str], *kinds: type[Any]) -> list[str]:
    """What other systems write: `512,256,128` for several numbers, `amp` for fp16. Refuses an empty
    word: as a path it would be this folder, and as `--data` no data at all."""
    lists = frozenset[str]().union(*map(number_lists, kinds))
    words: list[str] = []
    flag = ""
    for argument in arguments:
        if argument.startswith("--"):
            flag, equals, value = argument.partition("=")
            words.append(flag if equals else argument)
            if not equals:
                continue
            argument = value
        if not argument:
            raise InputError(
                f"{flag or 'An argument'} is empty, as a variable of the shell is that was not "
                "set. Give a value" + (", or leave the flag out." if flag else ".")
            )
        if flag.replace("_", "-") in lists and NUMBERS.fullmatch(argument):
            words += re.findall(r"[^\s,]+", argument)
        elif flag == "--precision" and argument == "amp":
            words.append("fp16")
        else:
            words.append(argument)
    return words


def _paired_flags(arguments: list[str]) -> Iterator[str]:
    """`--compile` and `--no-compile` for a field that can also be left to the machine."""
    for argument, following in itertools.zip_longest(arguments, arguments[1:]):
        if argument == "--no-compile":
            yield from ("--compile", "False")
        elif argument == "--compile" and following not in ("True", "False", "None"):
            yield from ("--compile", "True")
        else:
            yield argument


def _flag_value(arguments: list[str], flag: str) -> str | None:
    for place, argument in enumerate(arguments):
        if argument == flag and place + 1 < len(arguments):
            return arguments[place + 1]
        if argument.startswith(f"{flag}="):
            return argument.removeprefix(f"{flag}=")
    return None


def first_line(function: Callable[..., Any]) -> str:
    """The first line of a docstring, without its full stop."""
    return (function.__doc__ or "").splitlines()[0].rstrip(".")
