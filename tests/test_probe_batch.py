"""``xtuner-mamba probe-batch``: the search for the limit, a try, and what becomes of both."""

import doctest
import json
import os
import re
import signal
from itertools import count
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from transformers import MambaConfig, MambaForCausalLM

from xtuner_mamba import cli
from xtuner_mamba.dataset import BucketBatchSampler
from xtuner_mamba.integration.templates import templates
from xtuner_mamba.tools import batch_search, changed_training, probe_batch, probe_try
from xtuner_mamba.tools.batch_search import find_limit, most_tries
from xtuner_mamba.tools.fresh_process import run_fresh

GPU = torch.cuda.is_available()
BUCKET, PACKED = "mamba_demo_stdlib_bucket", "mamba_demo_stdlib_varlen"
VOCAB = 30
numbers = count()


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """What the demo's templates name, as small as can be."""
    monkeypatch.chdir(tmp_path)
    Path("demo/corpus").mkdir(parents=True)
    Path("demo/corpus/some.jsonl").write_text("not read")
    write_model(VOCAB)
    yield tmp_path
    if GPU:
        # a try in this process has limited what the tests after it may have
        torch.cuda.set_per_process_memory_fraction(1.0)


def write_model(vocab_size):
    torch.manual_seed(0)
    config = MambaConfig(
        vocab_size=vocab_size, hidden_size=8, state_size=4, num_hidden_layers=1, use_cache=False
    )
    MambaForCausalLM(config).save_pretrained("demo/model")


def write_config(template, appended="", **settings):
    text = Path(templates()[template]).read_text()
    for name, value in settings.items():
        text, count = re.subn(rf"^{name} = .*$", f"{name} = {value!r}", text, flags=re.M)
        assert count == 1, name
    # MMEngine names a run by its config and the second
    path = f"config_{next(numbers)}.py"
    Path(path).write_text(f"{text}\n{appended}\n")
    return path


class Memory:
    """Stands in for trainings: a batch fits if its tokens do."""

    def __init__(self, tokens):
        self.tokens, self.tries = tokens, []

    def run_fresh(self, function, config, documents, length, memory_limit):
        assert function is probe_try.try_shape
        assert documents not in [tried for tried, of in self.tries if of == length]
        self.tries.append((documents, length))
        if documents * length > self.tokens:
            return dict(fits=False)
        return dict(fits=True, peak_bytes=documents * length * 2**20, device="Some GPU")


@pytest.fixture
def memory(monkeypatch):
    memory = Memory(tokens=5000)
    monkeypatch.setattr(probe_batch, "run_fresh", memory.run_fresh)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return memory


sizes = st.integers(1, 300)


@given(limit=st.integers(0, 400), start=sizes, step=sizes, most=sizes, tolerance=st.floats(0, 0.5))
def test_the_search_finds_the_limit(limit, start, step, most, tolerance):
    start = min(start, most)
    tried = []

    def fits(size):
        assert 1 <= size <= most
        tried.append(size)
        return size <= limit

    options = dict(start=start, step=step, most=most, tolerance=tolerance)
    found = find_limit(fits, **options)
    assert tried[0] == start
    assert len(tried) == len(set(tried)) <= most_tries(**options)
    # both ends were seen, and lie as close together as asked for
    assert found.fits == max([size for size in tried if size <= limit], default=0)
    assert found.fails == min([size for size in tried if size > limit], default=None)
    above = most + 1 if found.fails is None else found.fails
    assert above - found.fits <= max(1, tolerance * found.fits)
    if tolerance == 0:
        assert found.fits == min(limit, most)


def test_a_good_guess_spares_tries():
    far = most_tries(start=1, step=1, most=4096)
    near = []
    find_limit(lambda size: near.append(size) or size <= 2100, start=2048, step=128, most=4096)
    assert len(near) < 10 < far
    # and from above as well
    below = []
    find_limit(lambda size: below.append(size) or size <= 1900, start=2048, step=128, most=4096)
    assert below[:3] == [2048, 1920, 1664]


def test_examples_and_refusals_of_the_search():
    assert doctest.testmod(batch_search).attempted > 3
    assert doctest.testmod(batch_search).failed == 0
    with pytest.raises(ValueError, match=r"start must be in \[1, most=4\], got 5"):
        find_limit(bool, start=5, step=1, most=4)
    with pytest.raises(ValueError, match="step must be at least 1, got 0"):
        find_limit(bool, start=1, step=0, most=4)


def test_each_bucket_and_the_pack_get_what_fits(memory, capsys):
    config = write_config(BUCKET, boundaries=[64, 256, 2048])
    assert cli.main(["probe-batch", config, "--out", "mine.yaml"]) == 0
    output = capsys.readouterr().out
    # 78 and 19 documents fit; the search stops short of them by 1/32 at most
    measured = yaml.safe_load(Path("mine.yaml").read_text())
    assert 0.85 * 78 * 31 / 32 - 1 <= measured["batch_sizes"][64] <= 0.85 * 78
    assert measured["batch_sizes"][256] == 16
    assert measured["batch_sizes"][2048] == 1
    assert measured["tokens"] == 64 * measured["batch_sizes"][64]
    assert measured["device"] == "Some GPU"
    for words in (
        "Some GPU",
        " 64 tokens",
        " 2,048 tokens",
        f"{measured['tokens']:,} tokens without padding",
        "mine.yaml",
    ):
        assert words in output
    # the second bucket is looked for where the first one's tokens point
    others = [documents for documents, length in memory.tries if length == 256]
    assert abs(others[0] - 19) <= 1
    assert len(others) <= 3
    # what was written is what a template reads
    sampler = BucketBatchSampler(
        [50, 200, 2000], boundaries=[64, 256, 2048], batch_sizes="mine.yaml"
    )
    assert sampler.batch_sizes.tolist() == list(measured["batch_sizes"].values())


def test_json_tells_of_every_try(memory, capsys):
    assert cli.main(["probe-batch", PACKED, "--json", "--most-tokens", "4096"]) == 0
    (pack,) = json.loads(capsys.readouterr().out)
    assert (pack["fits"], pack["fails"], pack["advised"]) == (8, None, 6)
    assert pack["shape"] == dict(length=512, own=4, most=8)
    assert pack["num_tries"] == len(memory.tries) == 2
    assert pack["peak_bytes"] == 8 * 512 * 2**20
    assert yaml.safe_load(Path("batch_sizes.yaml").read_text())["tokens"] == 6 * 512


def test_documents_that_do_not_fit_alone(memory, capsys):
    memory.tokens = 1000
    config = write_config(BUCKET, boundaries=[512, 2048])
    assert cli.main(["probe-batch", config]) == 1
    assert "a document of 2,048 tokens must fit in memory, got none that" in capsys.readouterr().err
    assert yaml.safe_load(Path("batch_sizes.yaml").read_text())["batch_sizes"] == {512: 1}


def test_nothing_is_written_where_nothing_fits(memory, capsys):
    assert cli.main(["probe-batch", PACKED]) == 0
    measured = Path("batch_sizes.yaml").read_text()
    memory.tokens, memory.tries = 0, []
    assert cli.main(["probe-batch", PACKED]) == 1
    output, errors = capsys.readouterr()
    assert "nothing is written" in output
    assert "a document of 512 tokens must fit in memory, got none that" in errors
    assert Path("batch_sizes.yaml").read_text() == measured


def test_what_replaces_another_measurement_says_so(memory, capsys):
    assert cli.main(["probe-batch", write_config(BUCKET, boundaries=[64, 2048])]) == 0
    memory.tries = []
    assert cli.main(["probe-batch", write_config(BUCKET, boundaries=[64, 2048])]) == 0
    assert "replaced" not in capsys.readouterr().err
    memory.tries = []
    assert cli.main(["probe-batch", write_config(BUCKET, boundaries=[2048])]) == 0
    assert (
        "batch_sizes.yaml was of Some GPU with boundaries [64, 2048]; replaced by Some GPU with "
        "boundaries [2048]\n"
    ) in capsys.readouterr().err
    text = Path("batch_sizes.yaml").read_text()
    Path("batch_sizes.yaml").write_text(text.replace("Some GPU", "Another GPU"))
    memory.tries = []
    assert cli.main(["probe-batch", write_config(BUCKET, boundaries=[2048])]) == 0
    assert "was of Another GPU with boundaries [2048]; repl" in capsys.readouterr().err
    assert Path("batch_sizes.yaml").read_text().partition("\n")[2] == text.partition("\n")[2]


def test_files_that_cannot_be_written_are_refused_before_a_try(memory, capsys):
    for path, message in (
        ("missing/mine.yaml", "can be written, got missing/mine.yaml: No such file or directory"),
        ("demo", "can be written, got demo: Is a directory; make its folder, or give another"),
        ("mine.txt", "or a file of this tool, got mine.txt, which begins with 'my notes'"),
    ):
        Path("mine.txt").write_text("my notes")
        assert cli.main(["probe-batch", PACKED, "--out", path]) == 1
        assert message in capsys.readouterr().err
        assert not memory.tries
    assert Path("mine.txt").read_text() == "my notes"
    # nor is one left behind where no try succeeds
    memory.tokens = 0
    assert cli.main(["probe-batch", PACKED, "--out", "new.yaml"]) == 1
    assert memory.tries
    assert not Path("new.yaml").exists()


@pytest.mark.parametrize("has_gpu", [True, False])
@pytest.mark.parametrize("contents", ["model = dict()\n", "\xff\xd8 a picture", "device: mine\n"])
def test_files_of_others_are_kept_whether_it_measures_or_lists(
    memory, monkeypatch, capsys, has_gpu, contents
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    Path("config.py").write_text(contents, encoding="latin1")
    before = Path("config.py").read_bytes()
    assert cli.main(["probe-batch", PACKED, "--out", "config.py"]) == 1
    assert "a file of this tool, got config.py, which begins with" in capsys.readouterr().err
    assert not memory.tries
    assert Path("config.py").read_bytes() == before
    # the config itself is no other
    config = write_config(PACKED)
    before = Path(config).read_bytes()
    assert cli.main(["probe-batch", config, "--out", config]) == 1
    assert Path(config).read_bytes() == before


@pytest.mark.parametrize("limit", ["-1", "0", "nan", "inf"])
def test_limits_that_are_none(memory, capsys, limit):
    assert cli.main(["probe-batch", PACKED, "--memory-limit", limit]) == 1
    assert f"number of GiB above 0, got {float(limit)}; leave" in capsys.readouterr().err
    assert not memory.tries


def test_a_config_without_training(capsys):
    Path("empty.py").write_text("train_cfg = dict(by_epoch=True)\n")
    assert cli.main(["probe-batch", "empty.py"]) == 1
    message = "got one without model, train_dataloader, optim_wrapper; give what `xtuner train`"
    assert message in capsys.readouterr().err


def test_an_interrupted_search_writes_nothing(memory, monkeypatch, capsys):
    def interrupt(*arguments):
        signal.getsignal(signal.SIGTERM)(signal.SIGTERM, None)

    monkeypatch.setattr(probe_batch, "run_fresh", interrupt)
    assert cli.main(["probe-batch", PACKED]) == 130
    assert capsys.readouterr().err.endswith(f"{PACKED}: stopped\n")
    assert not Path("batch_sizes.yaml").exists()


def test_a_try_that_fails_otherwise_ends_the_search(memory, monkeypatch, capsys):
    def fail(function, config, documents, length, memory_limit):
        memory.tries.append(documents)
        raise RuntimeError("the model is broken")

    monkeypatch.setattr(probe_batch, "run_fresh", fail)
    assert cli.main(["probe-batch", BUCKET]) == 1
    assert "the model is broken" in capsys.readouterr().err
    assert len(memory.tries) == 1
    assert not Path("batch_sizes.yaml").exists()


def test_without_a_gpu_the_plan_is_shown(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(probe_batch, "run_fresh", None)
    assert cli.main(["probe-batch", BUCKET, "--most-tokens", "8192"]) == 0
    output = capsys.readouterr().out
    assert "No GPU is seen" in output
    # now 32 documents of 64 tokens; 128 at most
    assert re.search(r" 64 tokens +32 +128 ", output)
    assert not Path("batch_sizes.yaml").exists()
    assert cli.main(["probe-batch", BUCKET, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan[0] == dict(length=64, own=32, most=512)
    assert [shape["length"] for shape in plan] == [64, 128, 256, 512, 1024, 2048]


@pytest.mark.parametrize(
    ("appended", "message"),
    [
        ("train_dataloader['dataset'] = dict(type=list)", "got list with None"),
        ("train_dataloader['batch_sampler']['tokens_per_batch'] = 9000", "at least the 9,000"),
    ],
)
def test_configs_whose_batches_are_not_known(appended, message, capsys):
    config = write_config(BUCKET, appended)
    assert cli.main(["probe-batch", config, "--most-tokens", "8192"]) == 1
    assert message in capsys.readouterr().err


def test_rows_of_a_config_that_pads():
    cfg = Config.fromfile(write_config(BUCKET, "train_dataloader.pop('batch_sampler')"))
    cfg.use_varlen_attn, cfg.train_dataloader.batch_size = False, 3
    (shape,) = probe_batch.plan_shapes(cfg)
    assert (shape.length, shape.own, shape.most) == (2048, 3, 48)


seen = []


@HOOKS.register_module()
class Watch(Hook):
    """Notes what a try trains on, among the hooks that a try keeps."""

    def before_train_iter(self, runner, batch_idx, data_batch):
        seen.append(data_batch["data"])

    def after_train(self, runner):
        wrapper = runner.optim_wrapper
        seen.append({int(state["step"]) for state in wrapper.optimizer.state.values()})
        seen.append(wrapper._accumulative_counts)


TOKEN_STEPS = """
from xtuner_mamba.engine import TokenAccumulationOptimWrapper, TokenStepLoop

optim_wrapper["type"] = TokenAccumulationOptimWrapper
optim_wrapper["tokens_per_step"] = 1_000_000
optim_wrapper.pop("accumulative_counts")
param_scheduler = None
train_cfg = dict(type=TokenStepLoop, max_iters=100)
"""
PADDED = "custom_hooks = custom_hooks[1:]"


@pytest.mark.parametrize(
    ("template", "settings", "appended", "micro_steps"),
    [
        (BUCKET, dict(), "", 1),
        (PACKED, dict(), "", 1),
        (BUCKET, dict(accumulative_counts=8), "", 2),
        (BUCKET, dict(), TOKEN_STEPS, 2),
        (BUCKET, dict(use_varlen_attn=False), PADDED, 1),
    ],
)
def test_a_try_takes_two_optimizer_steps_on_the_shape(
    monkeypatch, template, settings, appended, micro_steps
):
    seen.clear()
    monkeypatch.setattr(changed_training, "_BOUNDARY_HOOKS", ("PackedLayoutHook", "Watch"))
    watch = "custom_hooks = [*custom_hooks, dict(type='Watch')]"
    config = write_config(template, f"{appended}\n{watch}", **settings)
    result = probe_try.try_shape(config, documents=3, length=20)
    assert result["fits"]
    assert result["peak_bytes"] > 0
    *batches, steps, accumulated = seen
    assert steps == {2}
    assert accumulated == micro_steps
    # a loop over optimizer steps shows the first micro-batch of each
    assert len(batches) == (2 if appended == TOKEN_STEPS else 2 * micro_steps)
    for data in batches:
        shape = (3, 20) if "use_varlen_attn" in settings else (1, 60)
        assert data["input_ids"].shape == shape
        # random tokens of the whole vocabulary, of which none is padding
        assert len(data["input_ids"].unique()) > VOCAB / 2
        assert data["input_ids"].max() < VOCAB
        targets = (data["labels"].reshape(3, 20)[:, 1:] != -100).sum()
        assert targets == 3 * 19
    assert not torch.equal(batches[0]["input_ids"], batches[1]["input_ids"])


def test_a_limit_is_a_limit():
    config = write_config(BUCKET)
    # Python alone takes more
    assert probe_try.try_shape(config, 1, 20, memory_limit=2**20) == dict(fits=False)


def test_missing_memory_is_told_from_other_failures():
    def raised(error, cause=None):
        error.__cause__ = cause
        return error

    failures = [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        MemoryError("Unable to allocate 8.00 GiB for an array"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
        raised(ValueError("could not build the model"), cause=MemoryError()),
    ]
    assert all(map(probe_try.is_out_of_memory, failures))
    others = [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        ValueError("out of memory of what a document is"),
        raised(KeyError("text"), cause=ValueError("no such column")),
    ]
    assert not any(map(probe_try.is_out_of_memory, others))


def test_a_config_that_cannot_train_is_no_want_of_memory():
    config = write_config(BUCKET, "custom_hooks = []")
    with pytest.raises(SystemExit, match=r"custom_hooks must hold PackedLayoutHook .*, got \[\]"):
        probe_try.try_shape(config, 1, 20)
    with pytest.raises(ValueError, match="Invalid learning rate: -1"):
        probe_try.try_shape(write_config(BUCKET, lr=-1), 1, 20)


@pytest.mark.parametrize(
    ("function", "argument", "message"),
    [(int, "x", "ValueError: invalid literal for int"), (os._exit, 3, "BrokenProcessPool: ")],
)
def test_a_process_that_fails_says_why(function, argument, message):
    with pytest.raises(RuntimeError, match=rf"must end with a result, got {message}"):
        run_fresh(function, argument)


def test_memory_of_this_machine(capsys):
    # the logits of 512 tokens, and what becomes of them, take nearly a gigabyte
    write_model(vocab_size=150_000)
    config = write_config(PACKED, "model['fuse_loss'] = False", max_length=1024)
    # on the CPU Python and its libraries count too
    limit = 1.3 if GPU else 2.3
    arguments = ["--most-tokens", "1024", "--memory-limit", str(limit), "--json"]
    assert cli.main(["probe-batch", config, *arguments]) == 0
    (pack,) = json.loads(capsys.readouterr().out)
    assert (pack["fits"], pack["fails"], pack["num_tries"]) == (1, 2, 2)
    assert 0.3 * 2**30 < pack["peak_bytes"] < limit * 2**30
