"""Only what is in the file unchanged may be given back."""

from __future__ import annotations

import subprocess
import sys

from runtime.process_memory import clean_stretches
from tests.conftest import PROJECT

SMAPS = """\
7f0000000000-7f0000010000 r-xp 00000000 fe:00 5391608                    /lib/libllvmlite.so
Rss:                  64 kB
Private_Dirty:         0 kB
Anonymous:             0 kB
VmFlags: rd ex mr mw me sd
7f0000010000-7f0000020000 r--p 00010000 fe:00 5391608                    /lib/libllvmlite.so
Private_Dirty:        12 kB
Anonymous:            12 kB
VmFlags: rd mr mw me sd
7f0000020000-7f0000030000 rw-p 00020000 fe:00 5391608                    /lib/libllvmlite.so
Private_Dirty:         0 kB
VmFlags: rd wr mr mw me sd
7f0000030000-7f0000040000 r-xp 00000000 fe:00 77                         /lib/libother.so
Private_Dirty:         0 kB
VmFlags: rd ex mr mw me sd
7f0000040000-7f0000050000 rw-p 00000000 00:00 0
Private_Dirty:         0 kB
VmFlags: rd wr mr mw me sd
"""


def test_changed_writable_and_foreign_pages_are_kept():
    assert list(clean_stretches(SMAPS.splitlines(), "libllvmlite")) == [(0x7F0000000000, 0x10000)]


def test_the_compiler_still_works_afterwards():
    code = (
        "import numba, numpy as np; from runtime import process_memory as m; m.do_without_scipy(); f = numba.njit(lambda x: x + 1);"
        "assert f(1) == 2; m.give_back(); m.give_back(); g = numba.njit(lambda a: a.sum()); assert g(np.ones(3)) == 3.0 and f(2.5) == 3.5"
    )
    subprocess.run([sys.executable, "-c", code], cwd=PROJECT, check=True, timeout=120)
