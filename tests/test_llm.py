"""The blocking API: order, errors, progress, and scripts that just end."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import asyncmoe
from asyncmoe import LLM, SamplingParams
from asyncmoe.errors import ConfigError, RequestError, UnknownName
from asyncmoe.frontend.loopthread import LoopThread
from tests.servedmodel import make_served_checkpoint

GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_served_checkpoint(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(str(checkpoint), threads=1, max_requests=4) as llm:
        yield llm


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [[3 + i] * (1 + i % 5) for i in range(20)]  # more than run at once
    outputs = llm.generate(prompts, GREEDY, progress=False)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert all(len(output.token_ids) == 5 for output in outputs)
    assert outputs[7].token_ids == llm.generate(prompts[7], GREEDY, progress=False)[0].token_ids


def test_each_prompt_may_have_its_own_params(llm: LLM) -> None:
    each = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 3)]
    outputs = llm.generate(["a", "b"], each, progress=False)
    assert [len(output.token_ids) for output in outputs] == [1, 3]
    with pytest.raises(RequestError, match="3 prompts and 2 SamplingParams"):
        llm.generate(["a", "b", "c"], each, progress=False)


def test_one_text_is_one_prompt_and_a_chat_goes_through_the_template(llm: LLM) -> None:
    plain = llm.generate("user:hi;assistant:", GREEDY, progress=False)
    message = {"role": "user", "content": "hi"}
    chat = llm.chat([message], GREEDY, progress=False)
    several = llm.chat([[message], [message]], GREEDY, progress=False)
    texts = [output.text for output in (*plain, *chat, *several)]
    assert len(texts) == 4
    assert len(set(texts)) == 1


def test_no_prompts_are_no_outputs(llm: LLM) -> None:
    assert llm.generate([], GREEDY, progress=False) == []


def test_a_refused_prompt_raises_and_stops_the_others(llm: LLM) -> None:
    long = SamplingParams(max_tokens=400, ignore_eos=True)
    with pytest.raises(RequestError, match="999 is not in the vocabulary"):
        llm.generate([[1], [2], [999]], long, progress=False)
    assert len(llm.generate([[1]], GREEDY, progress=False)[0].token_ids) == 5


def test_params_of_another_kind_are_refused(llm: LLM) -> None:
    wrong: Any = {"temperature": 0}
    with pytest.raises(RequestError, match=r"params are \{'temperature': 0\}; allowed: Sampl"):
        llm.generate(["a"], wrong, progress=False)


def test_the_progress_bar_shows_a_rate_on_standard_error(
    llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    llm.generate(["a", "b"], GREEDY)
    shown = capsys.readouterr()
    assert "2/2" in shown.err
    assert "tokens/s" in shown.err
    assert shown.out == ""


async def test_it_works_inside_a_running_loop_as_in_a_notebook(llm: LLM) -> None:
    assert len(llm.generate(["a"], GREEDY, progress=False)[0].token_ids) == 5


def test_settings_have_flat_and_dotted_names_and_typos_are_explained(checkpoint: Path) -> None:
    with LLM(str(checkpoint), scheduler="flfs", prefill_chunk=8, **{"kv.blocks": 40}) as llm:
        config = llm.config
    assert (config.scheduler.name, config.engine.prefill_chunk, config.kv.blocks) == ("flfs", 8, 40)
    with pytest.raises(UnknownName, match=r"'schedular'\. Did you mean 'scheduler'"):
        LLM(str(checkpoint), schedular="flfs")
    with pytest.raises(ConfigError, match=r"kv\.blocks"):
        LLM(str(checkpoint), **{"kv.blocks": 0})


def test_a_closed_llm_leaves_no_thread_and_says_that_it_is_closed(checkpoint: Path) -> None:
    before = threading.active_count()
    llm = LLM(str(checkpoint), threads=1)
    llm.generate(["a"], GREEDY, progress=False)
    llm.close()
    llm.close()
    assert threading.active_count() == before
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate(["a"])


def test_a_script_needs_no_main_guard_and_no_close(checkpoint: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"import os\n"
        f"from asyncmoe import LLM, SamplingParams\n"
        f"llm = LLM({str(checkpoint)!r}, ranks=2, threads=1)\n"
        f"out = llm.generate(['a', 'b'], SamplingParams(max_tokens=3, ignore_eos=True))\n"
        f"print(*(len(o.token_ids) for o in out))\n"
        f"task = f'/proc/{{os.getpid()}}/task'\n"
        f"print(*(open(f'{{task}}/{{t}}/children').read() for t in os.listdir(task)))\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    counts, children = done.stdout.splitlines()
    assert counts == "3 3"
    assert children.split()
    assert not [pid for pid in children.split() if Path(f"/proc/{pid}").exists()]


async def slow_to_end(ended: list[str]) -> None:
    try:
        await asyncio.sleep(60)
    finally:
        await asyncio.sleep(0.05)
        ended.append("cleaned up")


def test_an_interrupt_is_raised_after_the_works_own_cleaning_up() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    thread, ended = LoopThread("asyncmoe"), list[str]()
    with pytest.raises(KeyboardInterrupt):
        thread.submit(slow_to_end(ended)).wait(interrupt)
    assert ended == ["cleaned up"]
    thread.stop()


def test_stopping_the_loop_lets_its_tasks_clean_up() -> None:
    thread, ended = LoopThread("asyncmoe"), list[str]()
    thread.submit(slow_to_end(ended))
    thread.submit(asyncio.sleep(0)).wait()
    thread.stop()
    assert ended == ["cleaned up"]


def test_an_interrupted_start_leaves_no_rank_and_no_thread(
    checkpoint: Path, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"import os, signal, threading, time\n"
        f"from asyncmoe import LLM\n"
        f"task = f'/proc/{{os.getpid()}}/task'\n"
        f"def ranks():\n"
        f"    found = []\n"
        f"    for thread in os.listdir(task):\n"
        f"        try:\n"
        f"            found += open(f'{{task}}/{{thread}}/children').read().split()\n"
        f"        except FileNotFoundError:\n"  # a thread that has just ended
        f"            pass\n"
        f"    return found\n"
        f"def interrupt():\n"
        f"    while not ranks():\n"
        f"        time.sleep(0.01)\n"
        f"    os.kill(os.getpid(), signal.SIGINT)\n"
        f"threading.Thread(target=interrupt, daemon=True).start()\n"
        f"try:\n"
        f"    LLM({str(checkpoint)!r}, ranks=2, threads=1)\n"
        f"except KeyboardInterrupt:\n"
        f"    print(ranks(), [t.name for t in threading.enumerate()])\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=90, check=False
    )
    assert done.stdout == "[] ['MainThread']\n", done.stderr
    assert "Traceback" not in done.stderr


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import asyncmoe, sys; assert 'torch' not in sys.modules; asyncmoe.LLM"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    with pytest.raises(AttributeError, match="no attribute 'LLN'"):
        asyncmoe.LLN  # noqa: B018
