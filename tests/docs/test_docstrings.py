"""The docstrings of public names, which the reference pages are made from: complete, and their examples run."""

import doctest
import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import neuromanifold as nm
from neuromanifold.uses.training.callbacks import FisherRecorder

REFERENCE = (Path(__file__).parents[2] / "docs" / "reference" / "index.md").read_text()
PUBLIC = {name: thing for name in nm.__all__ if callable(thing := getattr(nm, name))}
PUBLIC |= {name: getattr(nm.optim, name) for name in nm.optim.__all__} | {"FisherRecorder": FisherRecorder}
WARNINGS = {name for name, thing in PUBLIC.items() if isinstance(thing, type) and issubclass(thing, Exception)}
FUNCTIONS = {name for name, thing in PUBLIC.items() if not isinstance(thing, type)}
SECTION = re.compile(r"^(Args|Returns|Raises|Example):$", re.MULTILINE)


def sections(thing: Callable[..., object]) -> dict[str, str]:
    """The parts of a docstring by their headings; the summary and the text after it are "summary" and "text"."""
    summary, _, rest = (inspect.getdoc(thing) or "").partition("\n")
    text, *parts = SECTION.split(rest)
    return {"summary": summary, "text": text, **dict(zip(parts[::2], parts[1::2], strict=True))}


def described(thing: Callable[..., object]) -> set[str]:
    """The arguments that a docstring describes; "those of `fisher_diagonal`" refers to that function's."""
    parts = sections(thing)
    own = set(re.findall(r"^    (\w+):", parts.get("Args", ""), re.MULTILINE))
    referred = "those of `fisher_diagonal`" in " ".join(parts["text"].split())
    return own | (described(nm.fisher_diagonal) if referred else set())


def lacking(thing: Callable[..., object], function: bool) -> list[str]:
    """What a docstring does not have that a reader of its page needs."""
    parts = sections(thing)
    missing = [] if re.fullmatch(r"(?!.*\. ).{20,112}\.", parts["summary"]) else ["a first line that stands alone"]
    missing += [] if "Example" in parts else ["an example"]
    missing += [] if not function or {"Returns", "Raises"} <= parts.keys() else ["what it returns and raises"]
    if function or "Args" in parts:
        missing += sorted(set(inspect.signature(thing).parameters) - described(thing))
    return missing


@pytest.mark.parametrize("name", sorted(PUBLIC.keys() - WARNINGS))
def test_docstrings_are_complete(name: str) -> None:
    assert not lacking(PUBLIC[name], function=name in FUNCTIONS)


@pytest.mark.parametrize("name", sorted(WARNINGS))
def test_warnings_say_what_to_do(name: str) -> None:
    parts = sections(PUBLIC[name])
    assert parts["summary"].endswith(".")
    assert parts["text"].strip()


def failures(text: str, name: str = "example") -> str:
    """What the examples of a docstring print instead of what they say, on the network of the reference page."""
    known: dict[str, object] = {}
    exec(re.findall(r"^```python\n(.*?)^```", REFERENCE, re.DOTALL | re.MULTILINE)[0], known)
    test, reported = doctest.DocTestParser().get_doctest(text, known, name, None, 0), list[str]()
    assert test.examples
    doctest.DocTestRunner(verbose=False).run(test, out=reported.append)
    return "".join(reported)


@pytest.mark.parametrize("name", sorted(PUBLIC.keys() - WARNINGS))
def test_examples_print_what_they_say(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from neuromanifold.persample.rules import registry

    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))  # an example registers a rule
    assert not failures(sections(PUBLIC[name])["Example"], name)


def test_an_incomplete_docstring_and_a_wrong_example_would_be_seen() -> None:
    def function(data: object, way: str) -> None:
        """Return something that is described in a full sentence.

        Args:
            way: one of two.
        """

    assert lacking(function, function=True) == ["an example", "what it returns and raises", "data"]
    assert "Got" in failures(">>> len(data)\n5\n")
    assert not failures(">>> len(data)\n4\n")


def substitutions(text: str) -> list[str]:
    """Bars in descriptions of fields (`#:`) that Sphinx would take for a substitution."""
    fields = re.findall(r"#: (.*)$", text, re.MULTILINE)
    return [bar for field in fields for bar in re.findall(r"\|\S[^|]*\|", re.sub(r"`[^`]*`", "", field))]


def test_descriptions_of_fields_have_no_bars() -> None:
    sources = Path(nm.__file__).parent.rglob("*.py")
    assert not {path.name: found for path in sources if (found := substitutions(path.read_text()))}
    assert substitutions("x: float  #: mean of |a - b|, not `|a|`") == ["|a - b|"]
