"""`headrace chat` in a pipe and on a real terminal."""

import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest


def test_each_line_of_a_pipe_is_a_turn(headrace):
    result = headrace("chat", stdin="hello there\n\nagain\n")
    assert (result.exit_code, result.stdout) == (0, "hello there\nagain\n")


def test_a_message_given_is_the_first_turn(headrace):
    result = headrace("chat", "hello there", stdin="again\n")
    assert (result.exit_code, result.stdout) == (0, "hello there\nagain\n")


def test_a_failed_turn_ends_a_pipe_with_its_error(headrace):
    result = headrace("chat", stdin="hello\nrefuse\nnever asked\n")
    assert result.exit_code == 1
    assert result.stdout == "hello\n"
    assert "must be >= 0" in result.stderr


def test_figures_follow_each_answer(headrace):
    result = headrace("chat", "--figures", stdin="a b\nc\n")
    assert result.stderr.count("TTFT") == 2


class Terminal:
    """A chat on a pseudo terminal."""

    def __init__(self, command, *arguments):
        self._main, child = pty.openpty()
        self.process = command(
            "chat", *arguments, stdin=child, stdout=child, stderr=child, start_new_session=True
        )
        os.close(child)
        self._seen = ""

    def expect(self, text):
        """Reads until the text has come; returns what came before it."""
        end = time.monotonic() + 60
        while text not in self._seen:
            assert self._read(end - time.monotonic()), f"no {text!r} in {self._seen!r}"
        before, _, self._seen = self._seen.partition(text)
        return before

    def _read(self, timeout_s):
        if not select.select([self._main], [], [], max(0.0, timeout_s))[0]:
            return False
        self._seen += os.read(self._main, 4096).decode()
        return True

    def type(self, text):
        os.write(self._main, text.encode())

    def interrupt(self, until):
        """Ctrl-C as an impatient user does it: readline loses one that comes with its prompt."""
        end = time.monotonic() + 60
        while until not in self._seen:
            assert time.monotonic() < end, f"no {until!r} in {self._seen!r}"
            self.process.send_signal(signal.SIGINT)
            self._read(0.5)
        self.expect(until)

    def close(self):
        os.close(self._main)


@pytest.fixture
def terminal(command, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    terminal = Terminal(command)
    terminal.expect("> ")
    yield terminal
    terminal.close()


@pytest.mark.system
def test_ctrl_c_ends_the_answer_but_not_the_conversation(terminal):
    terminal.type("begin hang\n")
    terminal.expect("begin hang\r\n")
    terminal.expect("begin hang")
    terminal.interrupt(until="(stopped)")
    terminal.expect("> ")
    terminal.type("second\n")
    terminal.expect("second\r\n")
    terminal.expect("second\r\n")
    terminal.expect("> ")
    terminal.type("\x04")
    assert terminal.process.wait(10) == 0


@pytest.mark.system
def test_ctrl_c_at_the_prompt_says_how_to_leave(terminal):
    terminal.interrupt(until="(Ctrl-D leaves)")
    terminal.expect("> ")
    terminal.type("\x04")
    assert terminal.process.wait(10) == 0


@pytest.mark.system
def test_a_refused_turn_is_told_and_the_conversation_goes_on(terminal):
    terminal.type("refuse\n")
    terminal.expect("must be >= 0")
    terminal.expect("> ")
    terminal.type("better\n")
    terminal.expect("better\r\n")
    terminal.expect("better\r\n")


@pytest.mark.system
def test_what_was_said_is_sent_again_until_it_is_cleared(command, tmp_path):
    script = tmp_path / "chat.py"
    script.write_text(
        "import asyncio, io, sys\n"
        "from headrace.cli import chat\n"
        "from headrace.types import Delta, Sampling\n"
        "class Client:\n"
        "    async def generate(self, messages, **_):\n"
        "        print([(m.role, m.content) for m in messages], file=sys.stderr)\n"
        "        yield Delta(request_id='r', text='yes')\n"
        "sys.stdin = io.StringIO('one\\ntwo\\n/clear\\nthree\\n')\n"
        "with asyncio.Runner() as runner:\n"
        "    chat._Conversation(Client(), Sampling(), {}, figures=False).talk(runner)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == [
        "[('user', 'one')]",
        "[('user', 'one'), ('assistant', 'yes'), ('user', 'two')]",
        "[('user', 'three')]",
    ]
