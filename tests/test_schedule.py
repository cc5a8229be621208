"""How Programs order launches, find hazards, and share scratch."""

import random

import pytest

from lily_mlx import _ext


def levels(p):
    return [p.describe(i)["level"] for i in range(len(p))]


def edges(p):
    return [p.describe(i)["after"] for i in range(len(p))]


def test_raw_war_waw_order_launches(move):
    p = _ext.Program("p")
    x, w = p.slot("x", "input", 64), p.slot("w", "weight", 64)
    a, b = p.slot("a", "cache", 64), p.slot("b", "cache", 64)
    move(p, (a,), (x,))  # 0
    move(p, (b,), (w,))  # 1: independent
    move(p, (b,), (a,))  # 2: RAW on 0, WAW on 1
    move(p, (a,), (w,))  # 3: WAR with 2, and WAW with 0, implied
    p.finish()
    assert levels(p) == [0, 0, 1, 2]
    assert edges(p) == [[], [], [0, 1], [2]]
    assert p.report()["barriers"] == 2


def test_ranges_of_one_slot_that_do_not_overlap_run_together(move):
    p = _ext.Program("p")
    x, a = p.slot("x", "input", 64), p.slot("a", "cache", 64)
    move(p, (a, 0, 32), (x,))
    move(p, (a, 32, 32), (x,))
    move(p, (p.slot("o", "output", 64),), (a, 31, 2))
    move(p, (a, 33, 31), (x,))
    p.finish()
    assert levels(p) == [0, 0, 1, 1]
    assert edges(p)[2:] == [[0, 1], [1]]


def test_hazards_are_found_when_planted(move):
    p = _ext.Program("p")
    x, a, b = p.slot("x", "input", 8), p.slot("a", "cache", 8), p.slot("b", "cache", 8)
    move(p, (a,), (x,), label="first")
    move(p, (b,), (a,), label="second")
    move(p, (a,), (x,), label="third")
    p.finish()
    assert p.check_hazards() == []

    def planted(**kwargs):
        return sorted({(h["kind"], h["first"], h["second"]) for h in p.check_hazards(**kwargs)})

    assert planted(levels=[0, 0, 1]) == [("RAW", 0, 1)]
    assert planted(levels=[0, 1, 1]) == [("WAR", 1, 2)]
    assert planted(levels=[2, 3, 2]) == [("WAR", 1, 2), ("WAW", 0, 2)]
    assert planted(levels=[1, 0, 2]) == [("RAW", 0, 1)]
    assert planted(after=[[], [], [0, 1]]) == [("RAW", 0, 1)]
    assert planted(after=[[], [0], []]) == [("WAR", 1, 2), ("WAW", 0, 2)]
    text = p.check_hazards(levels=[0, 0, 1])[0]["text"]
    assert "'first' (write of 'a' bytes 0 to 8)" in text and "no barrier" in text


def random_program(move, seed, scratch):
    rng = random.Random(seed)
    p = _ext.Program("random")
    x = p.slot("x", "input", 64)
    slots = [
        p.scratch(f"s{i}", rng.choice([64, 300, 1000])) if scratch else p.slot(f"s{i}", "cache", 64)
        for i in range(12)
    ]
    used = set()
    for _ in range(60):
        y, a, b = rng.randrange(12), rng.randrange(12), rng.randrange(12)
        if scratch:
            sources = [slots[i] if i in used and i != y else x for i in (a, b)]
            move(p, (slots[y],), (sources[0],), (sources[1],))
            used.add(y)
        else:
            begin = rng.randrange(0, 48, 4)
            r = [(slots[i], begin, rng.choice([4, 16, 64 - begin])) for i in (a, b)]
            if y in (a, b):
                r = [(x,), (x,)]
            move(p, (slots[y], rng.randrange(0, 32), 32), *r, update=rng.random() < 0.5)
    if scratch:
        for i in set(range(12)) - used:
            move(p, (slots[i],), (x,))
    p.finish()
    return p


def conflicts(p):
    """All pairs of launches with a conflict, from the listing: nothing of the C++ checks."""
    slots = {s["name"]: s for s in p.slots}
    touched = []
    for i in range(len(p)):
        spans = []
        for a in p.describe(i)["arguments"]:
            s = slots[a["slot"]]
            scratch = s["kind"] == "scratch"
            begin = a["offset"] + (s["arena_offset"] if scratch else 0)
            where = "arena" if scratch else a["slot"]
            spans.append((where, begin, begin + a["bytes"], a["access"] != "read"))
        touched.append(spans)
    for j in range(len(p)):
        for i in range(j):
            if any(
                b1 == b2 and s1 < e2 and s2 < e1 and (w1 or w2)
                for b1, s1, e1, w1 in touched[i]
                for b2, s2, e2, w2 in touched[j]
            ):
                yield i, j


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("scratch", [False, True])
def test_levels_and_edges_keep_conflicts_apart_and_no_more(move, seed, scratch):
    p = random_program(move, seed, scratch)
    level, after = levels(p), edges(p)
    pairs = set(conflicts(p))
    reach = [set() for _ in range(len(p))]
    for j in range(len(p)):
        for i in after[j]:
            reach[j] |= {i} | reach[i]
    assert all(level[i] < level[j] and i in reach[j] for i, j in pairs)
    # As low as the conflicts allow, and every edge is a conflict that no other path implies.
    for j in range(len(p)):
        assert level[j] == max((level[i] + 1 for i, k in pairs if k == j), default=0)
        for i in after[j]:
            assert (i, j) in pairs
            assert not any(i in reach[k] for k in after[j] if k != i)


# ---- scratch


def test_scratch_is_shared_when_dead_and_only_then(move):
    p = _ext.Program("p")
    x, out = p.slot("x", "input", 1000), p.slot("out", "output", 1000)
    a, b, c = (p.scratch(n, 1000) for n in "abc")
    move(p, (a,), (x,))
    move(p, (b,), (a,))
    move(p, (c,), (b,))
    move(p, (out,), (c,))
    p.finish()
    offset = {s["name"]: s["arena_offset"] for s in p.slots}
    assert offset["a"] == offset["c"] != offset["b"]
    assert p.arena_bytes == 2048
    assert levels(p) == [0, 1, 2, 3]


def two_chains(move):
    """x -> a -> b -> c -> out and, inside it in program order, x -> d -> out2."""
    p = _ext.Program("p")
    x, out, out2 = p.slot("x", "input", 64), p.slot("out", "output", 64), p.slot("o", "output", 64)
    a, b, c, d = (p.scratch(n, size) for n, size in zip("abcd", (64, 64, 512, 512), strict=True))
    for y, source in ((a, x), (b, a), (c, b), (d, x), (out2, d), (out, c)):
        move(p, (y,), (source,))
    p.finish()
    return p


def test_sharing_scratch_adds_no_level(move):
    p = two_chains(move)
    assert levels(p) == [0, 1, 2, 0, 1, 3]
    assert p.arena_bytes == 512 + 512 + 256  # only a may share: with c


@pytest.mark.parametrize("seed", range(7))
def test_scratch_that_is_alive_is_never_overwritten(move, seed):
    p = random_program(move, seed, scratch=True) if seed else two_chains(move)
    slots = {s["name"]: s for s in p.slots}
    owner = {}
    for order in (range(len(p)), sorted(range(len(p)), key=levels(p).__getitem__)):
        for i in order:
            for a in p.describe(i)["arguments"]:
                s = slots[a["slot"]]
                if s["kind"] != "scratch":
                    continue
                span = range(s["arena_offset"], s["arena_offset"] + s["bytes"])
                if a["access"] == "read":
                    assert all(owner[byte] == s["name"] for byte in span)
                else:
                    owner.update(dict.fromkeys(span, s["name"]))


def test_scratch_read_before_it_is_written(move):
    p = _ext.Program("p")
    x, out, a = p.slot("x", "input", 8), p.slot("out", "output", 8), p.scratch("a", 8)
    move(p, (a, 0, 4), (x,))
    move(p, (out,), (a, 0, 8), label="reader")
    with pytest.raises(ValueError, match="'reader' reads byte 4 of scratch slot 'a'"):
        p.finish()


# ---- bindings
