"""The stand-in device: what Humming sees inside, that all is as before outside, and threads that do not
disturb each other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.support.sublayers import FP8, INT4, INT8, MXFP4, raw, sources

from humming_convert.errors import UnsupportedError
from humming_convert.host import shadow
from humming_convert.host.foreign import Foreign
from humming_convert.host.target import emulate, humming
from humming_convert.kernel_format import PackedSublayer, convert_to_humming_moe_kernel_format
from humming_convert.target import SUPPORTED_SMS, Target


def seams() -> dict[str, Foreign]:
    modules = humming()
    objects = {
        f"ops.{name}": getattr(modules.ops, name) for name in dir(modules.ops) if name.endswith("_weight")
    }
    awq = modules.schema_awq.AWQWeightSchema
    return objects | {
        "current_device": modules.device.current_device._value,
        "DeviceInfo": modules.transform.DeviceInfo,
        "compiler version": modules.config_config._cuda_compiler_version,
        "transform": modules.transform.transform_humming_weight,
        "pad": modules.transform.check_and_pad_tensors,
        "scale": modules.transform.transform_humming_weight_scale,
        "zero point": modules.transform.transform_humming_zero_point,
        "fit": getattr(modules.transform, "fit_fused_e8m0_scale_range", None),
        "awq": awq.__dict__["_convert_humming"],
        "torch.cuda.device": torch.cuda.device,
        "Tensor.cuda": torch.Tensor.cuda,
        "Tensor.cuda is inherited": "cuda" not in vars(torch.Tensor),
    }


def same(before: dict[str, Foreign], after: dict[str, Foreign]) -> list[str]:
    return [name for name in before if before[name] is not after[name]]


@pytest.mark.parametrize("sm", SUPPORTED_SMS)
def test_humming_sees_the_target(sm: int) -> None:
    device = humming().device.current_device
    with emulate(Target(sm, (12, 9), is_ppu=sm == 80)):
        assert (device.sm_version, device.sm_major, device.sm_minor) == (sm, sm // 10, sm % 10)
        assert device.is_ppu is (sm == 80)
        assert device.index == -1
        assert humming().transform.DeviceInfo(torch.device("cpu")).sm_version == sm
        assert humming().config_config._cuda_compiler_version(None) == (12, 9)
        assert torch.ones(2).cuda().device.type == "cpu"
        with torch.cuda.device(None):
            pass
        with pytest.raises(AttributeError, match=f"a stand-in for sm{sm} cannot say its sm_count"):
            _ = device.sm_count


def test_everything_is_put_back() -> None:
    before = seams()
    with emulate(Target(90)):
        inside = seams()
        with emulate(Target(100)):
            assert humming().device.current_device.sm_version == 100
        assert same(inside, seams()) == []
        assert humming().device.current_device.sm_version == 90
    assert len(same(before, inside)) >= 10
    assert same(before, seams()) == []


def test_everything_is_put_back_after_an_error() -> None:
    before = seams()
    with pytest.raises(KeyError, match="inside"), emulate(Target(90)):
        raise KeyError("inside")
    assert same(before, seams()) == []


def test_everything_is_put_back_when_installing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    before = seams()

    def broken(modules: Foreign) -> Foreign:
        raise RuntimeError("no such seam")

    monkeypatch.setattr(shadow, "seams", broken)
    with pytest.raises(RuntimeError, match="no such seam"), emulate(Target(90)):
        raise AssertionError("not reached")
    monkeypatch.undo()
    assert same(before, seams()) == []
    with emulate(Target(90)):
        assert humming().device.current_device.sm_version == 90
    assert same(before, seams()) == []


def test_each_thread_has_its_own_target() -> None:
    meet = threading.Barrier(len(SUPPORTED_SMS))

    def look(sm: int) -> tuple[int, int]:
        with emulate(Target(sm)):
            meet.wait(timeout=30)
            seen = humming().device.current_device.sm_version
            meet.wait(timeout=30)
            return sm, int(seen)

    before = seams()
    with ThreadPoolExecutor(len(SUPPORTED_SMS)) as pool:
        assert list(pool.map(look, SUPPORTED_SMS)) == [(sm, sm) for sm in SUPPORTED_SMS]
    assert same(before, seams()) == []


Row = tuple[dict[str, Foreign], dict[str, Foreign] | None, int]


def converters() -> list[Callable[[], PackedSublayer]]:
    rows: list[Row] = [
        (INT4, None, 90),
        (INT4, INT8, 80),
        (MXFP4, FP8, 90),
        (MXFP4, None, 120),
        (INT4, FP8, 89),
        (MXFP4, FP8, 100),
    ]

    def job(
        schema: dict[str, Foreign], activation: dict[str, Foreign] | None, sm: int
    ) -> Callable[[], PackedSublayer]:
        tensors = sources(schema, n=256, k=512, experts=2, seed=sm)
        return lambda: convert_to_humming_moe_kernel_format(
            tensors,
            schema,
            activation,
            shape_n=256,
            shape_k=512,
            shape_n_stacks=[256],
            num_experts=2,
            has_bias=False,
            param_dtype="bfloat16",
            target=Target(sm),
        )

    return [job(*row) for row in rows]


def test_threads_for_different_targets_give_what_one_thread_gives() -> None:
    jobs = converters()
    alone = [job() for job in jobs]
    before = seams()
    with ThreadPoolExecutor(4) as pool:
        together = [future.result() for future in [pool.submit(job) for job in jobs * 5]]
    assert same(before, seams()) == []
    for index, packed in enumerate(together):
        expected = alone[index % len(jobs)]
        assert packed.config.to_str() == expected.config.to_str()
        assert {name: raw(tensor) for name, tensor in packed.tensors.items()} == {
            name: raw(tensor) for name, tensor in expected.tensors.items()
        }


def test_a_gpu_of_another_architecture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(UnsupportedError) as caught, emulate(Target(100), torch.device("cuda", 0)):
        raise AssertionError("not reached")
    assert str(caught.value) == (
        "device: expected a GPU of sm100, found sm90; "
        "Humming's kernels run only there: use --device cpu, which converts for any target"
    )
