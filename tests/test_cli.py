"""The command line: exit codes, what is printed where, and how fast it starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from humming_convert.cli import main
from humming_convert.target import SUPPORTED_SMS
from tests.support.checkpoints import make_checkpoint


def run(*arguments: str | Path) -> Result:
    """One command, in this process."""
    return CliRunner().invoke(main, [str(argument) for argument in arguments], catch_exceptions=False)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint."""
    return make_checkpoint(tmp_path_factory.mktemp("cli") / "source")


@pytest.fixture(scope="module")
def out(source: Path) -> Path:
    """The checkpoint converted through the default command."""
    path = source.parent / "out"
    result = run(source, path, "--target", "sm90", "--device", "cpu")
    assert result.exit_code == 0, result.output
    return path


def test_default_command_is_convert(out: Path) -> None:
    assert (out / "humming" / "manifest.json").is_file()


def test_target_auto_without_a_gpu_says_so(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("humming_convert.resolve._visible_sms", list)
    result = run("convert", source, tmp_path / "out")
    assert result.exit_code == 0
    assert result.stderr == ("target: sm90 (Hopper), because this machine has no GPU (choose another with --target)\n")
    assert "2 MoE layers packed" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "hopper"], "error: --target: expected sm80, sm90, sm100, ..., found 'hopper'\n"),
        (["--target", "sm42"], f"error: target: expected one of {', '.join(f'sm{sm}' for sm in SUPPORTED_SMS)}, "
                               "found sm42\n"),
        (["--cuda", "thirteen"], "error: --cuda: expected a version such as 13.0, found 'thirteen'\n"),
        (["--device", "tpu"], "error: --device: expected auto, cpu, cuda or cuda:i, found 'tpu'\n"),
        (["--max-shard-size", "big"], "error: --max-shard-size: expected a size such as 5GB or 500MB, found 'big'\n"),
        (["--max-shard-size", "0"], "error: --max-shard-size: expected a size such as 5GB or 500MB, found '0'\n"),
        (["--max-shard-size", "9" * 400], "error: --max-shard-size: expected a size such as 5GB or 500MB, "
                                          f"found '{'9' * 400}'\n"),
        (["--activation", "int8"], None),
    ],
)  # fmt: skip
def test_wrong_values_leave_exit_code_1_and_nothing_else(
    arguments: list[str], message: str | None, source: Path, tmp_path: Path
) -> None:
    target = [] if "--target" in arguments else ["--target", "sm90"]
    result = run("convert", source, tmp_path / "out", *target, *arguments)
    assert result.exit_code == 1
    assert message is None or result.stderr == message
    assert "Traceback" not in result.output
    assert list(tmp_path.iterdir()) == []


def test_missing_source_is_one_line(tmp_path: Path) -> None:
    result = run("convert", tmp_path / "nothing", tmp_path / "out", "--target", "sm90")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {tmp_path / 'nothing'}: expected a .safetensors file or a model folder")
    assert result.stderr.count("\n") == 1


def test_plan_as_text_and_json(source: Path) -> None:
    text = run("plan", source)
    assert text.exit_code == 0
    assert "converted: 2 MoE layers" in text.stdout
    document = json.loads(run("plan", source, "--json").stdout)
    assert len(document["layers"]) == 2


def test_plan_imports_neither_torch_nor_numpy(source: Path) -> None:
    program = (
        "import sys; from humming_convert.cli import main\n"
        f"try: main(['plan', {str(source)!r}])\nexcept SystemExit: pass\n"
        "loaded = {'torch', 'numpy', 'humming', 'vllm'} & set(sys.modules)\n"
        "sys.exit(f'loaded {loaded}' if loaded else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_inspect_folder_and_file(out: Path) -> None:
    folder = json.loads(run("inspect", out, "--json").stdout)
    assert folder["target"]["sm"] == 90
    file = out / "humming" / "experts-00001-of-00002.safetensors"
    single = json.loads(run("inspect", file, "--json").stdout)
    (name,) = single["layers"]
    assert single["layers"][name] == folder["layers"][name]
    assert name in run("inspect", file).stdout
    assert "sm90" in run("inspect", out).stdout


def test_inspect_refuses_what_is_not_ours(source: Path) -> None:
    folder = run("inspect", source)
    assert folder.exit_code == 1
    assert "manifest" in folder.stderr
    file = run("inspect", source / "model.safetensors")
    assert file.exit_code == 1
    assert "expected an experts file of humming-convert" in file.stderr


def test_verify_passes_and_finds_a_flipped_byte(out: Path, source: Path, tmp_path: Path) -> None:
    assert run("verify", out, "--source", source).exit_code == 0
    file = out / "humming" / "experts-00001-of-00002.safetensors"
    before = file.read_bytes()
    spoiled = bytearray(before)
    spoiled[-1] ^= 1
    file.write_bytes(bytes(spoiled))
    result = run("verify", out)
    file.write_bytes(before)
    assert result.exit_code == 1
    assert "experts-00001-of-00002.safetensors" in result.stderr or "sha256" in result.stderr
    missing = run("verify", tmp_path / "nowhere")
    assert missing.exit_code == 1
    assert "expected a folder that humming-convert wrote" in missing.stderr


@pytest.mark.parametrize("name", ["/dev/null", "fifo"])
def test_inspect_of_what_is_no_file_answers_at_once(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    result = run("inspect", tmp_path / name)
    assert result.exit_code == 1
    assert result.stderr == (
        f"error: {tmp_path / name}: expected an output folder or a .safetensors file, found not a regular file\n"
    )


@pytest.mark.parametrize("command", ["inspect", "verify", "convert"])
def test_a_manifest_that_is_a_fifo_is_refused_at_once(command: str, source: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / "humming").mkdir(parents=True)
    os.mkfifo(tmp_path / "out" / "humming" / "manifest.json")
    extra = [source, tmp_path / "out", "--overwrite", "--target", "sm90"]
    result = run(command, *(extra if command == "convert" else [tmp_path / "out"]))
    assert result.exit_code == 1
    assert str(tmp_path / "out") in result.stderr
    assert command == "convert" or "found not a regular file" in result.stderr


def test_messages_of_inspect_and_verify_name_the_folder(tmp_path: Path) -> None:
    for command in ("inspect", "verify"):
        assert f"error: {tmp_path}/humming/manifest.json: expected a manifest" in run(command, tmp_path).stderr


def test_a_bare_file_with_a_quant_config_can_be_verified(source: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare.safetensors"
    bare.write_bytes((source / "model.safetensors").read_bytes())
    config = tmp_path / "quant.json"
    config.write_text(json.dumps(json.loads((source / "config.json").read_text())["quantization_config"]))
    out = tmp_path / "out"
    assert run(bare, out, "--target", "sm90", "--quant-config", config).exit_code == 0
    assert run("verify", out, "--source", bare, "--quant-config", config).exit_code == 0
    without = run("verify", out, "--source", bare)
    assert without.exit_code == 1
    assert "quant" in without.stderr


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (KeyError("experts"), "internal: KeyError: 'experts' (please report; HUMMING_CONVERT_TRACEBACK=1 shows where)"),
        (MemoryError(), "out of memory; --workers 1 needs the least"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
         "out of memory; --workers 1 needs the least"),
        (OSError(12, "Cannot allocate memory"), "out of memory; --workers 1 needs the least"),
    ],
)  # fmt: skip
def test_what_nobody_expected_is_one_line(
    error: Exception, text: str, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("humming_convert.source.open_checkpoint", fail)
    result = run("plan", source)
    assert (result.exit_code, result.stderr) == (1, f"error: {text}\n")
    monkeypatch.setenv("HUMMING_CONVERT_TRACEBACK", "1")
    shown = run("plan", source).stderr
    assert shown.startswith("Traceback")
    assert shown.endswith(f"error: {text}\n")


def test_the_report_names_target_and_humming(source: Path, tmp_path: Path) -> None:
    text = run(source, tmp_path / "out", "--target", "sm90").stdout
    assert f"for sm90 with humming-kernels {version('humming-kernels')}, " in text
    assert "MB/s" not in text
    assert "(1 file)" in run("inspect", tmp_path / "out").stdout


def test_tables(source: Path) -> None:
    formats = run("formats")
    assert "fp8-block" in formats.stdout
    assert json.loads(run("formats", "--json").stdout)
    targets = json.loads(run("targets", "--json").stdout)
    assert list(targets["targets"]) == [f"sm{sm}" for sm in SUPPORTED_SMS]
    assert "sm103" in run("targets").stdout


def test_help_names_every_command() -> None:
    text = run("--help").stdout
    for name in ("convert", "plan", "inspect", "verify", "formats", "targets"):
        assert name in text


def test_help_answers_at_once() -> None:
    times = []
    for _ in range(3):
        before = os.times()
        subprocess.run([sys.executable, "-m", "humming_convert.cli", "--help"], check=True, capture_output=True)
        after = os.times()
        used = after.children_user + after.children_system - before.children_user - before.children_system
        times.append(used)
    # 0.1 s; processor time, because the clock would also count whatever else this machine is busy with.
    assert min(times) < 0.3
