"""What a Program says it reads and writes is what its kernels touch on the checked host."""

import host_program
import numpy as np
import pytest
import small

from lily_mlx import _ext, kernels, spec


def run(built, filled):
    """Run on the checked host with zeros but for `filled`; a touch outside a range raises."""
    program = built.program
    arrays = {
        s["name"]: np.zeros(s["bytes"], np.uint8) for s in program.slots if s["kind"] != "scratch"
    }
    for name, data in built.tables.items():
        arrays[name][:] = np.frombuffer(data, np.uint8)
    for name, value in filled.items():
        arrays[name][:] = np.frombuffer(value.tobytes(), np.uint8)
    encoder = host_program.host_encoder(program, kernels.folder(), checked=True)
    bindings, arena = host_program.bind(program, arrays)
    encoder.encode(program, bindings)
    return host_program.overstated(program, bindings, encoder), arrays, arena


@pytest.mark.parametrize("options",
                         [{}, dict(fuse_delta=False, fuse_route=False)],
                         ids=["fused", "apart"])  # fmt: skip
def test_no_byte_of_a_decode_step_is_counted_that_is_not_moved(options):
    ours, _ = small.model()
    built = _ext.step_program(
        "metal", spec.model(ours.language_model), 256, {"context": 200, "logits": True, **options}
    )
    overstated, _, _ = run(built, {"position": np.array([199], np.int32)})
    assert overstated == []


def test_no_byte_of_a_prefill_chunk_is_counted_that_is_not_moved():
    ours, _ = small.model()
    built = _ext.chunk_program("metal", spec.model(ours.language_model), 20)
    overstated, _, _ = run(built, {"ids": np.arange(20, dtype=np.uint32)})
    # How many experts a chunk reaches depends on the words; at most all are counted.
    assert [x for x in overstated if "'experts" not in x] == []
