"""Passes as they are typed: what round-trips, and what is refused by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st

from h3compile.errors import BuildError
from h3compile.pipeline.base import Pass, Tier
from h3compile.pipeline.registry import Registry, of
from h3compile.pipeline.spelling import resolve, split_list


@dataclass(frozen=True)
class Plain(Pass):
    name: ClassVar[str] = "plain"
    tier: ClassVar[Tier] = Tier.EXACT
    default: ClassVar[bool] = True


@dataclass(frozen=True)
class Rich(Pass):
    name: ClassVar[str] = "rich-pass"
    tier: ClassVar[Tier] = Tier.LOSSY

    block: int = 16
    causal: bool = False
    until: float = 0.97
    dtype: str = "fp8_e4m3"
    sizes: tuple[int, ...] = (1, 2)
    gates: tuple[float, ...] = ()
    flags: tuple[bool, ...] = (True,)
    words: tuple[str, ...] = ("a",)
    pair: tuple[int, float] = (1, 0.5)
    limit: int | None = None
    label: str | None = None
    ratio: Optional[float] = 0.5  # noqa: UP045 - this spelling too
    either: str | int | bool = 3
    made: tuple[int, ...] = field(default_factory=tuple)
    internal: int = field(default=7, init=False)

    def __post_init__(self) -> None:
        if self.block % 2:
            raise ValueError(f"block {self.block} is odd")


@dataclass(frozen=True)
class Demanding(Pass):
    name: ClassVar[str] = "demanding"
    tier: ClassVar[Tier] = Tier.EXACT
    where: str = field(kw_only=True)


@pytest.fixture(scope="module")
def registry() -> Registry:
    return of({"plain": Plain, "rich-pass": Rich, "demanding": Demanding})


INTS = st.integers(-(10**20), 10**20)
FLOATS = st.floats(allow_nan=False)
WORDS = st.from_regex(r"[A-Za-z0-9_.:/-]+", fullmatch=True).filter(lambda word: word != "none")
LETTERS = st.from_regex(r"[A-Za-z_][A-Za-z_.-]*", fullmatch=True).filter(
    lambda word: word not in ("none", "true", "false")
)

RICH = st.builds(
    Rich,
    block=INTS.map(lambda n: 2 * n),
    causal=st.booleans(),
    until=FLOATS,
    dtype=WORDS,
    sizes=st.lists(INTS, max_size=3).map(tuple),
    gates=st.lists(FLOATS, max_size=3).map(tuple),
    flags=st.lists(st.booleans(), max_size=3).map(tuple),
    words=st.lists(WORDS, max_size=3).map(tuple),
    pair=st.tuples(INTS, FLOATS),
    limit=st.none() | INTS,
    label=st.none() | WORDS,
    ratio=st.none() | FLOATS,
    either=INTS | st.booleans() | LETTERS,
    made=st.lists(INTS, max_size=2).map(tuple),
)


@given(RICH)
def test_round_trip(item: Rich) -> None:
    registry = of({"rich-pass": Rich})
    passes, typed = resolve(item.spelled(), registry)
    (again,) = passes
    assert again == item
    assert repr(again) == repr(item)  # 1, 1.0 and True are equal, and not the same
    assert typed == {"rich-pass"}
    assert again.spelled() == item.spelled()


def test_only_what_differs_is_spelled() -> None:
    assert Plain().spelled() == "plain"
    assert Rich(block=32).spelled().startswith("rich-pass(block=32")
    text = Rich(causal=True, gates=(0.5, 1e20), limit=None, label="x").spelled()
    assert "causal=true" in text and "gates=0.5+1e20" in text and "limit" not in text


@pytest.mark.parametrize("word", ["", "a b", "a,b", "a)b", "a=b", "a+b", "none", "a\n", "ä"])
def test_what_cannot_be_typed_is_not_spelled(word: str) -> None:
    for item in (Rich(dtype=word), Rich(words=("a", word))):
        with pytest.raises(ValueError, match="cannot be typed as an option"):
            item.spelled()


def one(text: str, registry: Registry) -> Pass:
    return next(item for item in resolve(text, registry)[0] if item.name != "plain")


@pytest.mark.parametrize(
    ("text", "item"),
    [
        ("rich-pass", Rich()),
        ("rich-pass()", Rich()),
        (" rich-pass( block = 8 , dtype = int8 ) ", Rich(block=8, dtype="int8")),
        ("rich-pass(sizes=,flags=false+true)", Rich(sizes=(), flags=(False, True))),
        ("rich-pass(pair=3+1)", Rich(pair=(3, 1.0))),
        ("rich-pass(limit=none,ratio=none)", Rich(limit=None, ratio=None)),
        ("rich-pass(either=x)", Rich(either="x")),
        ("rich-pass(either=false)", Rich(either=False)),
    ],
)
def test_typed(registry: Registry, text: str, item: Rich) -> None:
    assert one(text, registry) == item
    assert repr(one(text, registry)) == repr(item)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("rich", "unknown pass 'rich': did you mean 'rich-pass'"),
        ("rich-pass(blok=1)", "rich-pass has no option 'blok': did you mean 'block'"),
        ("rich-pass(internal=1)", "rich-pass has no option 'internal'"),
        ("rich-pass(name=x)", "rich-pass has no option 'name'"),
        ("rich-pass(block)", "option 'block' of rich-pass has no value: write OPTION=VALUE"),
        ("rich-pass(block=x)", "'x' does not fit option block of rich-pass: give int"),
        ("rich-pass(block=)", "'' does not fit option block of rich-pass"),
        ("rich-pass(dtype=)", "'' does not fit option dtype of rich-pass: give str"),
        ("rich-pass(block=3)", "rich-pass: block 3 is odd"),
        ("rich-pass(block=2,block=4)", "option block of rich-pass is given twice"),
        ("rich-pass(causal=1)", "'1' does not fit option causal of rich-pass: give true or false"),
        ("rich-pass(flags=true+0)", "does not fit option flags of rich-pass"),
        ("rich-pass(pair=1)", "'1' does not fit option pair of rich-pass: give int.float"),
        ("rich-pass(pair=1+2+3)", "does not fit option pair"),
        ("rich-pass(limit=nothing)", "'nothing' does not fit option limit of rich-pass: give int or none"),
        ("demanding", "demanding needs option where: write demanding"),
        ("plain,plain", "pass 'plain' is named twice: name it once"),
        ("plain,-plain", "pass 'plain' is named twice"),
        ("-plain,-plain", "pass 'plain' is named twice"),
        ("-rich-pass(block=2)", "-rich-pass takes no options"),
        ("-nothing", "unknown pass 'nothing'"),
        ("--plain", "unknown pass '-plain': did you mean 'plain'"),
        ("plain(", "parentheses in .* do not match"),
        ("plain)", "parentheses in .* do not match"),
        ("plain(a=1))", "parentheses in .* do not match"),
        ("plain)(", "parentheses in .* do not match"),
        ("plain()more", "is not a pass: write NAME"),
        ("rich-pass(block=2)(block=2)", "parentheses|has no value|does not fit"),
        ("pl ain", "'pl ain' is not a pass"),
        ("plain\nrich-pass", "is not a pass"),
    ],
)
def test_refused(registry: Registry, text: str, reason: str) -> None:
    with pytest.raises(BuildError, match=reason):
        resolve(text, registry)


@given(st.text(alphabet="plainrch-_(),=+ 1.0\nblock", max_size=30))
def test_any_text_is_understood_or_refused(text: str) -> None:
    try:
        passes, typed = resolve(text, of({"plain": Plain, "rich-pass": Rich, "demanding": Demanding}))
    except BuildError:
        return
    assert typed <= {item.name for item in passes}


@pytest.mark.parametrize(
    ("text", "names", "typed"),
    [
        ("", ["plain"], set()),
        ("rich-pass", ["plain", "rich-pass"], {"rich-pass"}),
        ("-plain", [], set()),
        ("-plain,rich-pass", ["rich-pass"], {"rich-pass"}),
        (["rich-pass", "-plain"], ["rich-pass"], {"rich-pass"}),
        (["rich-pass(block=2,causal=true),-plain"], ["rich-pass"], {"rich-pass"}),
        ([], ["plain"], set()),
        ("plain", ["plain"], {"plain"}),
        ("-rich-pass", ["plain"], set()),
    ],
)
def test_the_default_set(registry: Registry, text: object, names: list[str], typed: set[str]) -> None:
    passes, asked = resolve(text, registry)  # type: ignore[arg-type]
    assert [item.name for item in passes] == names
    assert asked == typed


def test_split() -> None:
    assert split_list("a, b(c=1,d=2) ,,c") == ["a", "b(c=1,d=2)", "c"]
    assert split_list("") == split_list(" , ") == []
    assert split_list("a(b=(1,2)),c") == ["a(b=(1,2))", "c"]
