"""Chunks whose state is carried, against the whole document and against an explicit detach."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    FalconMambaConfig,
    FalconMambaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    ZambaConfig,
    ZambaForCausalLM,
)

from xtuner_mamba.carry import CarriedRows, CarriedStates
from xtuner_mamba.layout import IGNORE_INDEX, PackedLayout
from xtuner_mamba.model import dispatch_packed
from xtuner_mamba.model.dispatch import token_mixers
from xtuner_mamba.ops import selective_scan
from xtuner_mamba.testing import relative_rms

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
# kernels take no float64, and float32 is rounded
DTYPE, TOLERANCE = (torch.float32, 1e-5) if GPU else (torch.float64, 1e-12)
VOCAB = 30
# pieces of each chunk of two rows, and whether the first goes on with a document. The rows'
# documents have 14, 1, 3 and 4 tokens, and 2, 13 and 7; one piece is shorter than the filter, and
# one document ends with its chunk
CHUNKS = [
    ([[6], [2, 4]], [False, False]),
    ([[6], [6]], [True, True]),
    ([[2, 1, 3], [2]], [True, True]),
    ([[4], [1, 7]], [False, True]),
]
DOCUMENTS = [[14, 1, 3, 4], [2, 13, 7]]
SIZES = dict(vocab_size=VOCAB, hidden_size=16, use_cache=False, pad_token_id=None)
ZAMBA = dict(
    mamba_d_state=5,
    mamba_dt_rank=3,
    n_mamba_heads=2,
    intermediate_size=24,
    num_attention_heads=4,
    num_key_value_heads=4,
    num_hidden_layers=3,
    attn_layer_period=3,
    attn_layer_offset=1,
    use_mamba_kernels=False,
)


def build(name: str):
    pure = dict(state_size=5, num_hidden_layers=2)
    torch.manual_seed(0)
    if name == "Mamba":
        model = MambaForCausalLM(MambaConfig(**SIZES, **pure))
    elif name == "FalconMamba":
        model = FalconMambaForCausalLM(FalconMambaConfig(**SIZES, **pure))
    elif name == "Mamba2":
        config = Mamba2Config(**SIZES, **pure, num_heads=4, head_dim=8, n_groups=1, chunk_size=8)
        model = Mamba2ForCausalLM(config)
    else:
        model = ZambaForCausalLM(ZambaConfig(**SIZES, **ZAMBA, attn_implementation="eager"))
    model = model.to(DTYPE).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    model.to(DEVICE)
    dispatch_packed(model)
    return model


def draw(*shape) -> torch.Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return drawn.to(DEVICE, DTYPE)


def chunks_of(rows: list[torch.Tensor]) -> list[tuple[torch.Tensor, PackedLayout]]:
    """Cut rows, ``(total, ...)`` each, into the chunks: what they hold, and their layout."""
    states, places, chunks = CarriedStates(), [0, 0], []
    for step, (pieces, continues) in enumerate(CHUNKS):
        begins = places
        places = [place + sum(lengths) for place, lengths in zip(places, pieces)]
        parts = [row[begin:end] for row, begin, end in zip(rows, begins, places)]
        next_labels = [IGNORE_INDEX, IGNORE_INDEX]
        for row, goes_on in enumerate(CHUNKS[step + 1][1] if step + 1 < len(CHUNKS) else []):
            if goes_on and rows[row].ndim == 1:
                next_labels[row] = int(rows[row][places[row]])
        carried = dict(
            num_pieces=[len(lengths) for lengths in pieces],
            continues=continues,
            next_labels=next_labels,
            chunk=(0, step),
            plan={},
        )
        layout = PackedLayout.from_lengths([n for lengths in pieces for n in lengths])
        rows_of_chunk = replace(CarriedRows.from_batch(carried), states=states)
        layout = replace(layout, carried=rows_of_chunk).to(DEVICE)
        chunks.append((torch.cat(parts), layout, carried))
    return chunks


def in_rows(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Put the outputs of the chunks, ``(total, ...)`` each, together again, row by row."""
    rows = ([], [])
    for output, (pieces, _) in zip(outputs, CHUNKS):
        for row, part in zip(rows, output.split([sum(lengths) for lengths in pieces])):
            row.append(part)
    return [torch.cat(row) for row in rows]


def run_chunks(module, rows: list[torch.Tensor], forward=None) -> list[torch.Tensor]:
    forward = forward or (lambda part: module(part[None])[0])
    outputs = []
    for part, layout, carried in chunks_of(rows):
        layout.carried.states.begin(carried)
        with layout.published():
            outputs.append(forward(part))
    return in_rows(outputs)


def run_whole(module, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    outputs = []
    for row, lengths in zip(rows, DOCUMENTS):
        with PackedLayout.from_lengths(lengths).to(DEVICE).published():
            outputs.append(module(row[None])[0])
    return outputs


@pytest.mark.parametrize("name", ["Mamba", "FalconMamba", "Zamba", "Mamba2"])
def test_chunks_compute_what_the_whole_documents_compute(name):
    found = token_mixers(build(name))
    mixer = next(mixers[0] for key, mixers in found.items() if "Attention" not in key)
    rows = [draw(22, 16), draw(2, 22, 16)[1]]
    with torch.no_grad():
        whole, chunks = run_whole(mixer, rows), run_chunks(mixer, rows)
        for a, b in zip(chunks, whole):
            assert relative_rms(a, b) < TOLERANCE
        # without what was before, the tokens after a cut differ
        for part, layout, _ in chunks_of(rows)[1:2]:
            with replace(layout, carried=None).published():
                forgotten = mixer(part[None])[0]
        assert relative_rms(forgotten[:6], whole[0][6:12]) > 1e-3


def test_gradients_are_those_of_states_that_are_detached_by_hand():
    model = build("Mamba")
    mixer = model.backbone.layers[0].mixer
    rows = [draw(22, 16), draw(2, 22, 16)[1]]
    weight = draw(22, 16)

    def gradients(outputs) -> list[torch.Tensor]:
        total = sum((output * weight).sum() for output in outputs)
        return torch.autograd.grad(total, list(mixer.parameters()))

    carried = gradients(run_chunks(mixer, rows))
    for got, expected in zip(carried, gradients(run_by_hand(mixer, rows, detach=True))):
        assert relative_rms(got, expected) < TOLERANCE
    # those through the whole documents are others
    whole = gradients(run_by_hand(mixer, rows, detach=False))
    assert max(relative_rms(got, expected) for got, expected in zip(carried, whole)) > 1e-3
    for got, expected in zip(gradients(run_whole(mixer, rows)), whole):
        assert relative_rms(got, expected) < TOLERANCE


def run_by_hand(mixer, rows, *, detach: bool) -> list[torch.Tensor]:
    """Run a mixer piece by piece, with states passed on and detached where a chunk ends."""
    outputs = []
    dim, width, dstate = 32, 4, 5
    for number, row in enumerate(rows):
        place, parts = 0, []
        for pieces, continues in CHUNKS:
            for index, length in enumerate(pieces[number]):
                if index or not continues[number]:
                    conv = row.new_zeros(dim, width - 1)
                    ssm = row.new_zeros(1, dim, dstate)
                elif detach:
                    conv, ssm = conv.detach(), ssm.detach()
                x, z = mixer.in_proj(row[place : place + length]).chunk(2, dim=-1)
                inputs = torch.cat([conv, x.T], dim=1)
                conv = inputs[:, 1 - width :]
                x = F.conv1d(inputs, mixer.conv1d.weight, mixer.conv1d.bias, groups=dim).T
                x = F.silu(x)
                dt, B, C = mixer.x_proj(x).split([mixer.time_step_rank, dstate, dstate], dim=-1)
                y, ssm = selective_scan(
                    *(x[None], mixer.dt_proj(dt)[None], -mixer.A_log.exp(), B[None], C[None]),
                    D=mixer.D,
                    dt_softplus=True,
                    initial_states=ssm,
                    return_final_states=True,
                    impl="reference",
                )
                parts.append(mixer.out_proj(y[0] * F.silu(z)))
                place += length
        outputs.append(torch.cat(parts))
    return outputs


def token_rows() -> list[torch.Tensor]:
    drawn = torch.randint(1, VOCAB, (2, 22), generator=torch.Generator().manual_seed(2))
    return list(drawn.to(DEVICE))


def test_logits_and_losses_are_those_of_the_whole_documents():
    model = build("Mamba")
    rows = token_rows()
    logits = run_chunks(model, rows, lambda part: model(part[None]).logits[0])
    expected, targets = [], []
    for row, lengths in zip(rows, DOCUMENTS):
        layout = PackedLayout.from_lengths(lengths).to(DEVICE)
        with layout.published():
            expected.append(model(row[None]).logits[0])
        targets.append(layout.targets(row))
    for a, b in zip(logits, expected):
        # transformers rounds norms, residuals and logits to float32
        assert relative_rms(a, b) < max(TOLERANCE, 1e-6)
    # also the targets of tokens that the next chunk begins with
    found = in_rows([layout.targets(part) for part, layout, _ in chunks_of(rows)])
    assert [row.tolist() for row in found] == [row.tolist() for row in targets]
    without = in_rows(
        [replace(layout, carried=None).targets(part) for part, layout, _ in chunks_of(rows)]
    )
    assert sum((row == IGNORE_INDEX).sum() for row in without) == 7 + 5


@pytest.mark.parametrize("way", ["checkpoint", "reentrant", "recompute"])
def test_running_layers_again_changes_no_bit(way):
    gradients = []
    for again in (False, True):
        model = build("Mamba")
        if again and way == "recompute":
            dispatch_packed(model, recompute=True)
        elif again:
            options = dict(use_reentrant=way == "reentrant")
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
            model.enable_input_require_grads()

        def step(part, model=model):
            logits = model(part[None]).logits[0]
            logits.square().mean().backward()
            return logits.detach()

        logits = run_chunks(model, token_rows(), step)
        gradients.append([*logits, *(p.grad for p in model.parameters())])
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)


def test_documents_of_other_rows_are_isolated_to_the_bit():
    mixer = build("Mamba").backbone.layers[0].mixer
    rows = [draw(22, 16), draw(2, 22, 16)[1]]
    with torch.no_grad():
        before = run_chunks(mixer, rows)
        # the first document of the first row, which the second chunk goes on with
        rows[0] = rows[0].clone()
        rows[0][:14] = torch.nan
        after = run_chunks(mixer, rows)
    assert torch.equal(after[1], before[1])
    assert torch.equal(after[0][14:], before[0][14:])
    assert after[0][:14].isnan().all()


def test_what_was_left_out_is_refused():
    states = CarriedStates()
    carried = dict(continues=[True], chunk=(1, 3), plan=dict(seed=1, max_length=16))
    with pytest.raises(RuntimeError, match="of step 2 of epoch 1, got None; a batch was left out"):
        states.begin(carried)
    states.begin(carried | dict(continues=[False], chunk=(1, 1)))
    with pytest.raises(RuntimeError, match=r"of step 2 of epoch 1, got \(1, 1\)"):
        states.begin(carried)
    states.begin(carried | dict(chunk=(1, 2)))
    states.keep(0, torch.zeros(1, 3, 3), torch.zeros(1, 3, 4))
    with pytest.raises(RuntimeError, match=r"of \{'max_length': 16\} for \{'max_length': 12\};"):
        states.begin(carried | dict(plan=dict(seed=1, max_length=12)))
    # rows that begin anew have no use for the states of others
    states.begin(dict(continues=[False, False], chunk=(2, 0), plan=dict(seed=2, max_length=8)))
    assert states.before(0) is None
