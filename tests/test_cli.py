"""The command line: counts that can be checked by hand, and clear refusals."""

from __future__ import annotations

import io
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.shell_completion import ShellComplete

import radixkv
from radixkv import KVSpec, PrefixCache
from radixkv.cli import bench, common, generate
from radixkv.cli import main as cli
from radixkv.config import KV_DTYPES, KVConfig
from radixkv.models.small_model import prepare_small_model
from radixkv.tools.demo import PAGE_SIZE

GEOMETRY = ["--layers", "2", "--kv-heads", "3", "--head-dim", "8", "--dtype", "float32"]


def run(capsys, *arguments: str) -> str:
    assert cli.main(arguments) == 0
    return capsys.readouterr().out


def arguments_of(command: str, *given: str):
    """What a command's function is called with."""
    found = cli.commands.get_command(None, command)
    return common.read_arguments(found.make_context(command, list(given)))


def refusal(capsys, *arguments: str) -> str:
    """The one line that a refused command writes; nothing goes to standard output."""
    assert cli.main(arguments) == cli.EXIT_BAD_INPUT
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith(f"radixkv {arguments[0]}: error: ")
    return line


# calc


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_calc_counts_the_bytes_that_the_cache_has(capsys, kv_dtype):
    found = json.loads(run(capsys, "calc", *GEOMETRY, "--kv-dtype", kv_dtype, "--json"))
    (row,) = found["formats"]
    spec = KVSpec(num_layers=2, num_kv_heads=3, head_dim=8, dtype=torch.float32)
    stats = PrefixCache(spec, KVConfig(dtype=kv_dtype, capacity="1MiB")).stats()
    assert row["bytes_per_token"] == stats.bytes_per_token


def test_calc_counts_the_pages_that_leases_hold(capsys):
    """Oracle: sequences of a real cache, forked after a shared prefix."""
    spec = KVSpec(num_layers=1, num_kv_heads=1, head_dim=8)
    sizes = itertools.product((1, 3), (1, 7, 8, 9, 20), (0, 1, 8, 9, 16))
    for batch, length, shared in sizes:
        if not 0 < shared < length:
            continue
        cache = PrefixCache(spec, KVConfig(page_size=8, capacity="1MiB"))
        rows = torch.zeros(length, 1, 8)
        with cache.acquire(list(range(shared))) as lease:
            lease.write(0, rows[:shared], rows[:shared])
            branches = [lease, *(lease.fork() for _ in range(batch - 1))]
            for number, branch in enumerate(branches):
                branch.extend([100 + number] * (length - shared))
                branch.write(0, rows[shared:], rows[shared:])
            stats = cache.stats()
            for branch in branches[1:]:
                branch.release()
        arguments = ["--length", str(length), "--batch", str(batch), "--shared", str(shared)]
        arguments += ["--page-size", "8", "--kv-dtype", "int8", "--json"]
        (row,) = json.loads(run(capsys, "calc", *GEOMETRY, *arguments))["formats"]
        used = stats.pages_total - stats.pages_free
        assert row["pages"] == used, (batch, length, shared)


def test_calc_reckons_preallocation_in_the_models_own_dtype(capsys):
    arguments = ["--length", "100", "--batch", "4", "--max-length", "1000", "--json"]
    rows = json.loads(run(capsys, "calc", *GEOMETRY, *arguments))["formats"]
    assert [row["kv_dtype"] for row in rows] == list(KV_DTYPES)
    # 2 layers, 3 heads, K and V, 8 elements of 4 bytes; 4 sequences of 1,000 tokens
    assert {row["preallocated_bytes"] for row in rows} == {2 * 3 * 2 * 8 * 4 * 4 * 1000}
    for row in rows:  # 7 pages of 16 tokens a sequence
        assert row["copies_bytes"] == row["pages_bytes"] == 4 * 7 * 16 * row["bytes_per_token"]


def test_calc_reads_the_geometry_of_a_model(capsys):
    folder = str(prepare_small_model(progress=False))
    found = json.loads(run(capsys, "calc", "--model", folder, "--json"))
    layer = {"num_layers": 30, "num_kv_heads": 3, "head_dim": 64}
    assert found["layers"] == [{**layer, "v_head_dim": None, "window": None}]
    assert (found["dtype"], found["max_length"]) == ("float32", 8192)
    assert "11,880" in run(capsys, "calc", "--model", folder, "--kv-dtype", "int8")


def test_calc_counts_each_layer_by_its_own_heads_windows_and_sharing(tmp_path, capsys):
    import transformers as tf

    def calc(config):
        config.save_pretrained(tmp_path)
        arguments = ["--model", str(tmp_path), "--length", "1000", "--batch", "2", "--json"]
        return json.loads(run(capsys, "calc", *arguments, "--kv-dtype", "int8"))

    # 5 layers of 4 heads x 256 with a window, then one of 2 heads x 512 without; the last 2 of
    # 8 layers read another's K and V.
    types = ["sliding_attention"] * 5 + ["full_attention", "sliding_attention", "full_attention"]
    gemma = tf.Gemma4TextConfig(
        num_hidden_layers=8, num_key_value_heads=4, head_dim=256, sliding_window=512,
        num_kv_shared_layers=2, layer_types=types, global_head_dim=512,
        num_global_key_value_heads=2, attention_k_eq_v=True, max_position_embeddings=4096,
        dtype="bfloat16",
    )  # fmt: skip
    found = calc(gemma)
    kinds = [tuple(kind.values()) for kind in found["layers"]]
    assert kinds == [(5, 4, 256, None, 512), (1, 2, 512, None, None)]
    (row,) = found["formats"]
    assert row["bytes_per_token"] == 5 * 4 * 2 * (256 + 2) + 2 * 2 * (512 + 2)
    assert row["preallocated_bytes"] == 2 * (512 * 5 * 4 * 2 * 512 + 4096 * 2 * 2 * 1024)
    # Three of four layers keep a state instead; a window without layer types is every layer's.
    hybrid = calc(tf.Qwen3NextConfig(num_hidden_layers=8))
    assert [kind["num_layers"] for kind in hybrid["layers"]] == [2]
    (kind,) = calc(tf.MistralConfig(num_hidden_layers=3, sliding_window=100))["layers"]
    assert (kind["num_layers"], kind["num_kv_heads"], kind["window"]) == (3, 8, 100)


def test_calc_prints_a_table_to_paste(capsys):
    lines = run(capsys, "calc", *GEOMETRY).splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert len(rows) == len(KV_DTYPES) + 2  # a heading and a rule
    assert len({line.count("|") for line in rows}) == 1
    assert set(rows[1]) <= set("|-: ")


def test_calc_refuses_models_that_keep_no_k_and_v(tmp_path, capsys):
    import transformers as tf

    tf.DeepseekV3Config().save_pretrained(tmp_path)
    assert "compressed latents" in refusal(capsys, "calc", "--model", str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--layers", "2"], "expected --model, or all of --layers, --kv-heads, --head-dim"),
        ([], "got none of them"),
        ([*GEOMETRY, "--length", "0"], "--length: expected an integer >= 1, got 0"),
        ([*GEOMETRY, "--length", "5", "--shared", "6"], "--shared: expected an integer from 0"),
        ([*GEOMETRY, "--length", "5", "--max-length", "4"], "--max-length: expected"),
        ([*GEOMETRY, "--page-size", "12"], "page_size: expected a power of two"),
        ([*GEOMETRY, "--kv-dtype", "int9"], "expected one of 'int8', "),
        ([*GEOMETRY, "--model", "."], "expected --model or --layers, --kv-heads, --head-dim"),
        (["--model", "./no/such/folder"], "there is no such folder"),
    ],
)
def test_calc_refuses_in_one_line(capsys, arguments, says):
    assert says in refusal(capsys, "calc", *arguments)


# generate


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([""], "prompt: expected some text, got none"),
        (["hi", "--temperature", "-1"], "temperature: expected a finite number >= 0.0, got -1.0"),
        (["hi", "--n", "0"], "SamplingParams.n: expected an integer from 1 to 65536, got 0"),
        (["hi", "--beams", "0"], "BeamParams.width: expected an integer from 1 to 65536, got 0"),
        (["hi", "--beams", "2", "--n", "2"], "--n: expected 1 with --beams, got 2"),
        (["hi", "--kv-dtype", "int9"], "KVConfig.dtype: expected one of"),
        (["hi", "--capacity", "lots"], "KVConfig.capacity: expected"),
        (["hi", "--file", "prompt.txt"], "expected a prompt or --file, got both"),
        (["--file", "no-such-file.txt"], "--file: expected a readable UTF-8 text file"),
        (["hi", "--model", "./no/such/folder"], "there is no such folder"),
    ],
)
def test_generate_refuses_in_one_line(capsys, arguments, says):
    assert says in refusal(capsys, "generate", *arguments)


def test_generate_reads_a_file_standard_input_or_the_argument(tmp_path, monkeypatch):
    file = tmp_path / "prompt.txt"
    file.write_text("Hé, you\n\n", encoding="utf-8")
    monkeypatch.setattr("sys.stdin", io.StringIO("from stdin\n"))

    def read(*given):
        return generate._read_prompt(arguments_of("generate", *given))

    assert read("--file", str(file)) == "Hé, you\n"
    assert read("-") == "from stdin"
    assert read("as it is ") == "as it is "
    assert read("hi", "--chat") == [{"role": "user", "content": "hi"}]
    system = {"role": "system", "content": "Be brief."}
    assert read("hi", "--system", "Be brief.") == [system, {"role": "user", "content": "hi"}]


GREEDY = ["The capital of France is", "--max-new-tokens", "4", "--capacity", "16MiB"]


@pytest.mark.slow
def test_generate_streams_what_json_gives(capsys):
    text = run(capsys, "generate", *GREEDY, "--temperature", "0")
    found = json.loads(run(capsys, "generate", *GREEDY, "--temperature", "0", "--json"))
    (sample,) = found["samples"]
    assert text == sample["text"] + "\n"
    assert sample["text"].startswith(" Paris")
    assert (len(sample["token_ids"]), sample["finish_reason"]) == (4, "length")
    assert (found["prompt_tokens"], found["cached_tokens"]) == (5, 0)


@pytest.mark.slow
def test_generate_prints_samples_and_beams_apart(capsys):
    samples = run(capsys, "generate", *GREEDY, "--n", "2", "--seed", "1")
    assert samples.count("--- 1 of 2") == samples.count("--- 2 of 2") == 1
    beams = json.loads(run(capsys, "generate", *GREEDY, "--beams", "2", "--json"))["samples"]
    assert len(beams) == 2
    assert beams[0]["score"] >= beams[1]["score"]


# demo


@pytest.mark.slow
def test_the_demo_shows_that_the_document_is_read_once(capsys):
    """The main job, as a machine sees it: figures that must hold on any hardware."""
    figures = json.loads(run(capsys, "demo", "--json"))
    first, *later = figures["questions"]
    assert figures["document_tokens"] > 1400
    assert first["cached_tokens"] == 0
    for row in later:
        assert row["prompt_tokens"] - row["cached_tokens"] < 30
        assert row["answer"].strip()
    assert figures["second_question_sooner"] >= 8
    samples, beams, cache = figures["samples"], figures["beams"], figures["cache"]
    shared_pages = samples["prompt_tokens"] // PAGE_SIZE
    tails = [
        -(-(samples["prompt_tokens"] + new) // PAGE_SIZE) - shared_pages
        for new in samples["new_tokens"]
    ]
    assert samples["pages_held"] <= shared_pages + 1 + sum(tails)
    assert beams["cached_tokens"] == beams["prompt_tokens"] - 1
    scores = [beam["score"] for beam in beams["beams"]]
    assert len(scores) == 4
    assert scores == sorted(scores, reverse=True)
    assert cache["pages_free"] + cache["pages_cached"] == cache["pages_total"]
    assert cache["utilization"] >= 0.96


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_reader_that_leaves_early_gets_no_traceback(form):
    env = {**os.environ, "PYTHONPATH": str(Path(radixkv.__file__).parent.parent)}
    command = [sys.executable, "-m", "radixkv", "calc", *GEOMETRY, *form]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env
    ) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


def test_help_names_every_command(capsys):
    text = run(capsys, "--help")
    folder = Path(cli.__file__).parent
    files = {path.stem for path in folder.glob("*.py")} - {"__init__", "common", "main"}
    assert files == set(cli._COMMANDS)
    assert all(f"\n  {name} " in text for name in files)


@pytest.mark.parametrize("name", cli._COMMANDS)
def test_each_command_has_help_and_json(capsys, name):
    text = run(capsys, name, "--help")
    assert text.startswith(f"Usage: radixkv {name} ")
    assert "--json " in text


def test_help_and_version_load_no_library_that_a_command_needs():
    heavy = ["torch", "transformers", "numpy", "rich", "numba", "radixkv.config"]
    code = "import sys; from radixkv.cli.main import main; assert main(sys.argv[1:]) == 0\n"
    code += f"assert not set({heavy}) & sys.modules.keys()"
    for asked in ("--help", "--version"):
        subprocess.run([sys.executable, "-c", code, asked], check=True, capture_output=True)


def test_bench_cache_ends_in_json_with_its_setting(capsys):
    arguments = ("bench", "cache", "--trace", "rag", "--requests", "30", "--capacity", "20000")
    record = json.loads(run(capsys, *arguments).strip().splitlines()[-1])
    assert record["capacity_tokens"] == 20_000
    assert record["hardware"]
    (trace,) = record["traces"]
    assert (trace["trace"], trace["num_requests"]) == ("rag", 30)
    assert 0 < trace["us_p50"] <= trace["us_p99"]
    assert trace["host_bytes_per_token"] < 16
    assert trace["tokens_matched"] > 0


# Options without effect, and options that are not ours


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("generate hi --beams 2 --temperature 0.5 --stop x", "--temperature: expected none with"),
        ("generate hi --beams 2 --temperature 1.0", "got --temperature 1.0; leave it out"),
        ("generate hi --beams 2 --stop x", "--stop: expected none with --beams"),
        ("generate hi --beams 2 --top-p 0.5", "--top-p: expected none with --beams"),
        ("generate hi --beams 2 --top-k 5", "--top-k: expected none with --beams"),
        ("generate hi --beams 2 --seed 0", "--seed: expected none with --beams"),
        ("bench cache --growth --trace rag", "--trace: expected none with cache --growth"),
        ("bench cache --growth --requests 3", "--requests: expected none with cache --growth"),
        ("bench cache --kv-dtype int8", "--kv-dtype: expected none with cache, where it has no"),
        ("bench cache --model x", "--model: expected none with cache"),
        ("bench kernel --trace rag", "--trace: expected none with kernel"),
        ("bench kernel --compile-only --tune", "--compile-only: expected none with kernel --tune"),
        ("bench kernel --compile-only --heads 8 2 64", "--heads: expected none with kernel --comp"),
        ("bench load --batch 3", "--batch: expected none with load"),
        ("bench steps --rate 3", "--rate: expected none with steps"),
        (
            "bench steps --quick",
            "--quick: expected none with steps, where it has no effect, got --q",
        ),
        ("bench online --workload rag", "--workload: expected none with online"),
        ("bench offline --rate 3", "--rate: expected none with offline"),
        ("bench offline --quick --repeats 2", "--repeats: expected none with --quick"),
        (
            "bench offline --against transformers --gguf x",
            "--gguf: expected none without --against",
        ),
        ("bench steps --kv-dtype int8 --kv-dtype int4", "--kv-dtype: expected one with steps"),
    ],
)
def test_an_option_without_effect_is_refused(capsys, arguments, says):
    assert says in refusal(capsys, *arguments.split())


def test_every_option_of_a_measurement_is_known_to_one():
    options = {option.name: option for option in bench.command.params}
    assert set().union(*bench._USED.values()) == options.keys() - {"what", "json"}
    assert {mode.split()[0] for mode in bench._USED} == set(options["what"].type.choices)


def test_what_was_given_is_told_from_defaults():
    given = arguments_of("generate", "hi", "--top-k", "0", "--stop", "a").given
    assert given == {"prompt": "hi", "top_k": 0, "stop": ("a",)}
    arguments = arguments_of("generate", "--n", "2")
    assert arguments.given == {"n": 2}
    assert (arguments.max_new_tokens, arguments.stop, arguments.prompt) == (128, (), None)


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        ("generate hi --max-tokens 5", "for --max-tokens did you mean --max-new-tokens?"),
        ("generate hi --num-beams=5", "for --num-beams did you mean --beams?"),
        ("generate hi --temprature 1", "for --temprature did you mean --temperature?"),
        ("generate hi --num_return_sequences 2", "did you mean --n?"),
        ("generate hi --kv-cache-dtype int8", "did you mean --kv-dtype?"),
        ("generate hi --gpu-memory-utilization 0.9", "did you mean --capacity?"),
        ("calc --block-size 8", "did you mean --page-size?"),
        ("calc --batch-size 8", "did you mean --batch?"),
        ("bench offline --num-runs 2", "did you mean --repeats?"),
        ("generate hi --max-new 5", "for --max-new did you mean --max-new-tokens?"),
        ("bench cach", "did you mean 'cache'?"),
        ("quality --rotate hadamrd", "did you mean 'hadamard'?"),
    ],
)
def test_an_unknown_option_is_refused_with_the_one_that_is_meant(capsys, arguments, meant):
    assert meant in refusal(capsys, *arguments.split())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("generate hi --qqq 3", "unrecognized option: --qqq"),
        ("generate hi you", "Got unexpected extra argument (you)"),
        ("generate hi --n x", "Invalid value for '--n': 'x' is not a valid integer."),
        ("generate hi --n", "Option '--n' requires an argument."),
        ("bench kernel --heads 8 2", "Option '--heads' requires 3 arguments."),
        ("snapshot info", "Missing argument 'FILE...'."),
    ],
)
def test_what_no_command_takes_is_refused_in_one_line(capsys, arguments, says):
    assert refusal(capsys, *arguments.split()).endswith(f"error: {says}")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "Missing command."),
        (["genrate", "hi"], "did you mean 'generate'?"),
        (["--jsn"], "No such option '--jsn'."),
    ],
)
def test_what_is_no_command_is_refused_in_one_line(capsys, arguments, says):
    assert cli.main(arguments) == cli.EXIT_BAD_INPUT
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("radixkv: error: ")
    assert line.endswith(says)


def test_a_shell_completes_commands_and_options():
    complete = ShellComplete(cli.commands, {}, "radixkv", "_RADIXKV_COMPLETE").get_completions
    assert [item.value for item in complete([], "ge")] == ["generate"]
    assert [item.value for item in complete(["generate"], "--max")] == ["--max-new-tokens"]


def test_an_interrupt_ends_a_command_without_a_traceback(capsys, monkeypatch):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "_read_prompt", interrupt)
    assert cli.main(["generate", "hi"]) == cli.EXIT_INTERRUPTED
    assert capsys.readouterr().err.strip() == ""


def test_a_length_of_no_tokens_is_not_taken_for_none(capsys):
    assert "--max-length: expected an integer >= 4096, got 0" in refusal(
        capsys, "calc", *GEOMETRY, "--max-length", "0"
    )
