"""What several blocks have in common, kept once."""

from __future__ import annotations

from collections.abc import Iterator

from midstream.tracing import Block, Code
from midstream.tracing.sharing import Sharing
from midstream.tracing.shipping import Opened, write

CODE = Code("    pass\n", "f.py", 2)


def nobody(_):
    return None


def shared(*blocks, lasting=()) -> Sharing:
    """Take blocks in that are given by their values; all have one source."""
    sharing = Sharing()
    for values in blocks:
        block = values if isinstance(values, Block) else Block(code=CODE, values=values)
        sharing.add(write(block, nobody, {name: block.values[name] for name in lasting}))
    return sharing


def rebuilt(sharing: Sharing) -> Iterator[dict]:
    """Values of the blocks as the other side has them."""
    for common, own in sharing.split():
        yield Opened(common or own).block(nobody, own if common else b"").values


def test_source_and_equal_values_are_kept_once():
    """Blocks of one source share it with the values that are alike; what differs is their own."""
    text = "long " * 1000
    sharing = shared(*({"text": text, "i": i} for i in range(3)), lasting=["text"])
    pairs = sharing.split()
    assert len({id(common) for common, _ in pairs}) == 1
    assert text.encode() in pairs[0][0]
    assert all(len(own) < 40 for _, own in pairs)
    assert list(rebuilt(sharing)) == [{"text": text, "i": i} for i in range(3)]


def test_blocks_without_a_difference_have_nothing_of_their_own():
    """Of blocks that are all alike only the common part is left, and a few bytes that say so."""
    sharing = shared({"x": 1}, {"x": 1})
    assert [0 < len(own) < 5 for _, own in sharing.split()] == [True, True]
    assert list(rebuilt(sharing)) == [{"x": 1}, {"x": 1}]


def test_a_block_alone_stays_whole():
    """A block that is the only one of its source shares nothing."""
    other = Block(code=Code("    1\n", "f.py", 9), values={"x": 2})
    pairs = shared({"x": 1}, other, {"x": 1}).split()
    assert [bool(common) for common, _ in pairs] == [True, False, True]
    assert Opened(pairs[1][1]).block(nobody).code == other.code


def test_contents_at_capture_decide():
    """An object that changes between two captures is in each block as it was then."""
    sharing, rows = Sharing(), []
    for i in range(3):
        rows.append(i)
        sharing.add(write(Block(code=CODE, values={"rows": rows}), nobody, {"rows": rows}))
    assert [values["rows"] for values in rebuilt(sharing)] == [[0], [0, 1], [0, 1, 2]]


def test_every_block_has_copies_of_its_own():
    """Blocks made of one common part share no value."""
    first, second = rebuilt(shared({"x": [1]}, {"x": [1]}))
    first["x"].append(2)
    assert second["x"] == [1]


def test_one_object_under_a_common_and_an_own_name_stays_one():
    """Identity is kept between what is shared and what is not."""
    thing = [1]
    blocks = ({"a": thing, "b": (thing, i)} for i in range(2))
    for values in rebuilt(shared(*blocks, lasting=["a"])):
        assert values["b"][0] is values["a"]
