#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`yoke top` on a terminal: serve_top.py COMMAND...; exit 1 where it does not end as it should and leave the terminal
as it was. By q, Ctrl-C and SIGTERM, each after some pictures, the last of them of a terminal of another size."""
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time

RESTORED = b"\x1b[?7h\x1b[?25h\x1b[?1049l"


def live(end):
    terminal, side = pty.openpty()
    before = termios.tcgetattr(side)
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("4H", 24, 100, 0, 0))

    def lead():  # a session of its own, whose terminal this is: Ctrl-C is for it
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    top = subprocess.Popen(sys.argv[1:], stdin=side, stdout=side, stderr=side, preexec_fn=lead)
    seen, deadline = b"", time.monotonic() + 60

    def until(what, done):
        nonlocal seen
        while not done():
            assert time.monotonic() < deadline, f"{what}: not in a minute; seen: {seen[-2000:]!r}"
            if select.select([terminal], [], [], 0.1)[0]:
                seen += os.read(terminal, 65536)
    try:
        until("three pictures", lambda: seen.count(b"\x1b[H") >= 3)
        assert seen.startswith(b"\x1b[?1049h") and b"replica" in seen, seen
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 3, 20, 0, 0))
        seen = b""
        until("a picture of three lines", lambda: any(0 < p.count(b"\n") <= 2 for p in seen.split(b"\x1b[J")))
        end(terminal, top)
        until("its end", lambda: top.poll() is not None and not select.select([terminal], [], [], 0)[0])
        assert top.returncode == 0, f"exit code {top.returncode}"
        assert seen.endswith(RESTORED), f"the screen is not put back: {seen[-100:]!r}"
        assert termios.tcgetattr(side) == before, "the terminal's settings are not put back"
    finally:
        top.kill()
        top.wait()
        os.close(terminal)
        os.close(side)


live(lambda terminal, top: os.write(terminal, b"xq"))
live(lambda terminal, top: os.write(terminal, b"\x03"))
live(lambda terminal, top: top.send_signal(signal.SIGTERM))
