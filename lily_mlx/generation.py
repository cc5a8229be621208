"""`generate` and `stream_generate` with mlx-lm's signatures, on lily's generate_step."""

from __future__ import annotations

from mlx_lm.generate import GenerationResponse, generation_stream

from lily_mlx.decode import generate_step
from lily_mlx.private import private_copy

# mlx-lm's functions look generate_step up in their own module; a private instance of that module
# runs the same code with ours, and leaves mlx_lm.generate as everybody else knows it.
_own = private_copy("generate")
_own.generate_step = generate_step
_own.generation_stream = generation_stream
_own.GenerationResponse = GenerationResponse

generate = _own.generate
stream_generate = _own.stream_generate
