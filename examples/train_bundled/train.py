"""Trains the bundled model for a given time with transformers' Qwen3.5-MoE modules.

    python train.py --work WORK --out OUT --seconds 250

Reads WORK/train.bin and WORK/heldout.bin. Writes OUT/model-*.safetensors (bf16) whenever the
held-out loss of the 4-bit weights is the best so far, and OUT/log.jsonl. The learning rate follows
a cosine over the time. In the last part of the run the forward pass sees the weights rounded to
their 4-bit grid (the gradients go to the unrounded ones), so that the quantised model loses little.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from model import published_name, text_config
from safetensors.torch import save_file
from torch import nn
from transformers import Qwen3_5MoeForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as modeling

GROUP = 64
CHUNK = 64
SHARDS = 2


def dense_experts(
    experts: nn.Module, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Every expert on every row, weighted by the router: no gathers, three large products.

    hidden [rows, hidden], index and weights [rows, top_k]; with few small experts this is faster
    than sorting the rows, and it gives the same values.
    """
    count, width = experts.num_experts, experts.intermediate_dim
    dense = torch.zeros(hidden.shape[0], count, dtype=weights.dtype, device=weights.device)
    dense = dense.scatter(1, index, weights)
    both = F.linear(hidden, experts.gate_up_proj.reshape(count * 2 * width, -1))
    gate, up = both.view(-1, count, 2, width).unbind(2)
    active = experts.act_fn(gate) * up * dense.to(gate.dtype).unsqueeze(-1)
    down = experts.down_proj.transpose(1, 2).reshape(count * width, -1)
    return active.reshape(-1, count * width) @ down.to(active.dtype)


def shifted_conv(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_: object,
) -> torch.Tensor:
    """The depthwise causal convolution as a sum of shifted rows, [batch, channels, rows].

    A compiler fuses it into one kernel; cuDNN's depthwise weight gradient is slow.
    """
    taps, rows = weight.shape[-1], hidden_states.shape[-1]
    padded = F.pad(hidden_states, (taps - 1, 0))
    weight = weight.to(hidden_states.dtype)
    out = sum(weight[:, i : i + 1] * padded[..., i : i + rows] for i in range(taps))
    return F.silu(out) if activation == "silu" else out


def unit_lower_inverse(lower: torch.Tensor) -> torch.Tensor:
    """Inverse of I + `lower`, strictly lower triangular [..., n, n] with n a power of two.

    Diagonal blocks of doubling size: inverse of [[A, 0], [C, B]] = [[A', 0], [-B'CA', B']].
    """
    size = lower.shape[-1]
    row = torch.arange(size, device=lower.device)
    inverse = torch.eye(size, device=lower.device, dtype=lower.dtype).expand_as(lower)
    block = 1
    while block < size:
        same = (row[:, None] // (2 * block)) == (row[None, :] // (2 * block))
        cross = same & ((row[:, None] // block) != (row[None, :] // block))
        inverse = inverse - inverse @ (lower * cross) @ inverse
        block *= 2
    return inverse


def delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """The gated delta rule in chunks of CHUNK rows, from a zero state, without the final state.

    query, key, value [batch, rows, heads, width], g (log decay) and beta [batch, rows, heads].
    Products in float32 (TF32 on the GPU) also under autocast.
    """
    rows = query.shape[1]
    padding = -rows % CHUNK

    def chunks(x: torch.Tensor) -> torch.Tensor:
        x = x.transpose(1, 2).to(torch.float32, memory_format=torch.contiguous_format)
        x = F.pad(x, (0, 0, 0, padding)) if x.ndim == 4 else F.pad(x, (0, padding))
        return x.unflatten(2, (-1, CHUNK))

    with torch.autocast(query.device.type, enabled=False):
        q, k, v, log_decay, b = (chunks(x) for x in (query, key, value, g, beta))
        q = q * torch.rsqrt((q * q).sum(-1, keepdim=True) + 1e-6) * q.shape[-1] ** -0.5
        k = k * torch.rsqrt((k * k).sum(-1, keepdim=True) + 1e-6)
        total = log_decay.cumsum(-1)
        later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
        ratio = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(later, -math.inf).exp()
        weighted = k * b.unsqueeze(-1)
        system = (weighted @ k.transpose(-1, -2) * ratio).tril(-1)
        inverse = unit_lower_inverse(system)
        fresh = inverse @ (v * b.unsqueeze(-1))
        reading = inverse @ (weighted * total.exp().unsqueeze(-1))
        within = q @ k.transpose(-1, -2) * ratio
        across = q * total.exp().unsqueeze(-1)
        writing = (k * (total[..., -1:] - total).exp().unsqueeze(-1)).transpose(-1, -2)
        kept = total[..., -1].exp()[..., None, None]
        state = torch.zeros_like(writing[:, :, 0] @ v[:, :, 0])
        out = []
        for i in range(q.shape[2]):
            update = fresh[:, :, i] - reading[:, :, i] @ state
            out.append(across[:, :, i] @ state + within[:, :, i] @ update)
            state = state * kept[:, :, i] + writing[:, :, i] @ update
        result = torch.cat(out, 2)[:, :, :rows].transpose(1, 2)
    return result.to(query.dtype), None


def build(device: torch.device) -> Qwen3_5MoeForCausalLM:
    """The model in float32 with fresh weights, its slow parts replaced by equal fast ones."""
    ALL_EXPERTS_FUNCTIONS.register("dense", dense_experts)
    modeling.causal_conv1d_fn = shifted_conv
    modeling.torch_chunk_gated_delta_rule = delta_rule
    config = text_config()
    config._experts_implementation = "dense"
    config._attn_implementation = "sdpa"
    model = Qwen3_5MoeForCausalLM(config).float().to(device)
    scale = (2 * config.num_hidden_layers) ** -0.5
    with torch.no_grad():  # the layers' outputs start small, as in GPT-2
        for name, value in model.named_parameters():
            if name.endswith(("out_proj.weight", "o_proj.weight", "down_proj", "down_proj.weight")):
                value *= scale
    return model


def forward(
    model: Qwen3_5MoeForCausalLM, ids: torch.Tensor, dropout: float
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Final hidden rows and every layer's router logits; dropout on what a layer adds.

    The text model's own forward, module by module, so that the compiler sees no hooks.
    """
    text = model.model
    hidden = F.dropout(text.embed_tokens(ids), dropout)
    positions = torch.arange(ids.shape[1], device=ids.device)
    rotary = text.rotary_emb(hidden, positions.view(1, 1, -1).expand(3, ids.shape[0], -1))
    routers = []
    for layer in text.layers:
        normed = layer.input_layernorm(hidden)
        if hasattr(layer, "linear_attn"):
            mixed = layer.linear_attn(hidden_states=normed)
        else:
            mixed, _ = layer.self_attn(
                hidden_states=normed, attention_mask=None, position_embeddings=rotary
            )
        hidden = hidden + F.dropout(mixed, dropout)
        normed = layer.post_attention_layernorm(hidden)
        routers.append(layer.mlp.gate(normed)[0])
        hidden = hidden + F.dropout(layer.mlp(normed), dropout)
    return text.norm(hidden), tuple(routers)


def losses(
    model: Qwen3_5MoeForCausalLM, rows: torch.Tensor, dropout: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean next-token loss and the load balancing loss of [batch, length + 1] ids."""
    hidden, routers = forward(model, rows[:, :-1], dropout)
    logits = model.lm_head(hidden).float()
    loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    balance = 0.0
    for router in routers:
        chances = router.float().softmax(-1)
        kept = torch.zeros_like(chances).scatter(1, chances.topk(model.num_experts_per_tok)[1], 1.0)
        balance = balance + (kept.mean(0) * chances.mean(0)).sum() * model.num_experts
    return loss, balance / len(routers)


def on_grid(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """The weights rounded to MLX's affine grid: groups of 64 along the last axis."""
    groups = weight.reshape(-1, GROUP)
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    levels = 2**bits - 1
    scale = ((high - low) / levels).clamp_min(1e-7)
    negative = low.abs() > high.abs()
    scale = torch.where(negative, scale, -scale)
    edge = torch.where(negative, low, high)
    zero = torch.round(edge / scale)
    scale = torch.where(zero != 0, edge / zero, scale).bfloat16().float()
    bias = torch.where(zero != 0, edge, torch.zeros_like(edge)).bfloat16().float()
    codes = torch.round((groups - bias) / scale).clamp(0, levels)
    return (codes * scale + bias).view_as(weight)


class Grid:
    """Puts the quantisable parameters on their grid for a forward pass, and back."""

    def __init__(self, model: nn.Module, compiled: bool) -> None:
        self.params: dict[int, list[torch.Tensor]] = {4: [], 8: []}
        for name, value in model.named_parameters():
            gate = name.endswith(("mlp.gate.weight", "shared_expert_gate.weight"))
            if value.ndim >= 2 and "conv1d" not in name:
                self.params[8 if gate else 4].append(value)
        self.masters = {bits: [p.detach().clone() for p in ps] for bits, ps in self.params.items()}
        self.round = torch.compile(on_grid) if compiled else on_grid

    @torch.no_grad()
    def enter(self) -> None:
        for bits, params in self.params.items():
            torch._foreach_copy_(self.masters[bits], params)
            flat = self.round(torch.cat([param.flatten() for param in params]), bits)
            parts = flat.split([param.numel() for param in params])
            torch._foreach_copy_(params, [x.view_as(p) for x, p in zip(parts, params, strict=True)])

    @torch.no_grad()
    def leave(self) -> None:
        for bits, params in self.params.items():
            torch._foreach_copy_(params, self.masters[bits])


def batches(
    ids: np.ndarray, batch: int, length: int, device: torch.device, seed: int
) -> Iterator[torch.Tensor]:
    """Endless [batch, length + 1] ids: every epoch a new offset and a new order."""
    rng = np.random.default_rng(seed)
    data = torch.from_numpy(ids.astype(np.int32)).to(device)
    while True:
        starts = np.arange(rng.integers(length), len(ids) - length - 1, length)
        rng.shuffle(starts)
        for i in range(0, len(starts) - batch + 1, batch):
            index = torch.from_numpy(starts[i : i + batch]).to(device)
            yield data[index[:, None] + torch.arange(length + 1, device=device)].long()


@torch.no_grad()
def evaluate(loss_of, ids: np.ndarray, batch: int, length: int, device: torch.device) -> float:
    """Mean loss a token over the held-out ids in windows of `length`."""
    total = count = 0.0
    starts = np.arange(0, len(ids) - length - 1, length)
    for i in range(0, len(starts) - batch + 1, batch):
        rows = np.stack([ids[s : s + length + 1] for s in starts[i : i + batch]]).astype(np.int64)
        with torch.autocast(device.type, torch.bfloat16):
            loss, _ = loss_of(torch.from_numpy(rows).to(device), 0.0)
        total, count = total + loss.item(), count + 1
    return total / count


def save(model: nn.Module, out: Path) -> None:
    """The unrounded weights in bf16 (A_log float32), in SHARDS files, each replaced whole."""
    tensors = {}
    for name, value in model.state_dict().items():
        dtype = torch.float32 if name.endswith("A_log") else torch.bfloat16
        tensors[published_name(name)] = value.to("cpu", dtype).contiguous()
    limit = sum(tensor.nbytes for tensor in tensors.values()) / SHARDS
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if size > limit and len(shards) < SHARDS:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    for i, shard in enumerate(shards):
        path = out / f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, path.with_suffix(".tmp"), metadata={"format": "pt"})
        path.with_suffix(".tmp").replace(path)


def optimizer_for(model: nn.Module, rate: float, decay: float) -> torch.optim.AdamW:
    """AdamW; weight decay on the matrices alone."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim >= 2 and "conv1d" not in name]
    others = [p for name, p in named if p.ndim < 2 or "conv1d" in name]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=True)


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device(args.device)
    args.out.mkdir(parents=True, exist_ok=True)
    ids = np.fromfile(args.work / "train.bin", dtype=np.uint16)
    heldout = np.fromfile(args.work / "heldout.bin", dtype=np.uint16)
    model = build(device)
    optimizer = optimizer_for(model, args.rate, args.decay)
    grid = Grid(model, args.compile)

    def loss_of(rows: torch.Tensor, dropout: float) -> tuple[torch.Tensor, torch.Tensor]:
        return losses(model, rows, dropout)

    step_losses = torch.compile(loss_of, dynamic=False) if args.compile else loss_of
    source = batches(ids, args.batch, args.length, device, args.seed)
    print(f"{len(ids):,d} training tokens, {args.batch * args.length:,d} a step", flush=True)

    begun = time.monotonic()
    best, step, recent, rounding = math.inf, 0, [], False
    last_eval = start = None
    log = open(args.out / "log.jsonl", "w")  # noqa: SIM115
    while True:
        now = time.monotonic()
        if step == 3:  # past compilation; the first evaluation compiles too
            evaluate(step_losses, heldout, args.batch, args.length, device)
            start = last_eval = now = time.monotonic()
            print(f"three steps with compilation: {now - begun:.0f} s", flush=True)
        done = 0.0
        if start is not None:
            seen = step * args.batch * args.length / len(ids)
            done = max((now - start) / args.seconds, seen / args.epochs)
            done = 1.0 if now - begun > args.limit else done
        if step > 3 and (done >= 1.0 or now - last_eval > args.every or step in (30, 100)):
            plain = evaluate(step_losses, heldout, args.batch, args.length, device)
            grid.enter()
            coarse = evaluate(step_losses, heldout, args.batch, args.length, device)
            grid.leave()
            entry = {
                "step": step,
                "seconds": round(now - start, 1),
                "epochs": round(step * args.batch * args.length / len(ids), 2),
                "loss": round(float(torch.stack([pair[0] for pair in recent]).mean()), 4),
                "balance": round(float(torch.stack([pair[1] for pair in recent]).mean()), 4),
                "heldout": round(plain, 4),
                "heldout_4bit": round(coarse, 4),
                "rate": optimizer.param_groups[0]["lr"],
            }
            print(json.dumps(entry), flush=True)
            log.write(json.dumps(entry) + "\n")
            log.flush()
            recent = []
            if coarse < best:
                best = coarse
                save(model, args.out)
            last_eval = time.monotonic()
            if done >= 1.0:
                break
        rate = args.rate * min(1.0, (step + 1) / args.warmup)
        rate *= 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        rounding = rounding or done >= args.rounding
        rows = next(source)
        if rounding:
            grid.enter()
        with torch.autocast(device.type, torch.bfloat16):
            loss, balance = step_losses(rows, args.dropout)
        (loss + args.balance * balance).backward()
        if rounding:
            grid.leave()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recent.append((loss.detach(), balance.detach()))
        step += 1
        # Reading the loss also keeps the host from running ahead.
        if (step % 10 == 0 or step == 3) and not math.isfinite(loss.item()):
            raise RuntimeError(f"The loss is {loss.item()} at step {step}: lower --rate.")
    print(f"best held-out loss of the 4-bit weights: {best:.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=250, help="training time after compiling")
    parser.add_argument("--epochs", type=float, default=22, help="at most so many")
    parser.add_argument("--limit", type=float, default=math.inf, help="time with compilation")
    parser.add_argument("--every", type=float, default=30, help="seconds between evaluations")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--warmup", type=int, default=200)
    parser.add_argument("--decay", type=float, default=0.2)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--balance", type=float, default=0.001)
    parser.add_argument("--rounding", type=float, default=0.7, help="part of the run unrounded")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--seed", type=int, default=1)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
