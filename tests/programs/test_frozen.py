"""Programs stay what they were, dispatch by dispatch, unless a change means to change them."""

import json

from tests.programs import frozen


def test_programs_are_those_that_were_frozen():
    found, kept = frozen.collect(), json.loads(frozen.FILE.read_text())
    assert found.keys() == kept.keys()
    changed = {name: [x for x in found[name] if x not in kept[name]] for name in kept}
    changed = {name: lines for name, lines in changed.items() if found[name] != kept[name]}
    assert not changed, "if that was meant: python -m tests.programs.frozen"
