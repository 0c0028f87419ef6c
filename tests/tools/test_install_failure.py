"""The first real error is found in a build's output."""

from __future__ import annotations

import pytest

from hvdkit.prepare.install.runner import LONGEST, first_error, is_out_of_memory

NINJA_ERROR = """\
[ 40%] Building CXX object horovod/torch/CMakeFiles/pytorch.dir/handle_manager.cc.o
In file included from /src/horovod/common/common.h:30,
                 from /src/horovod/torch/handle_manager.cc:16:
/src/horovod/common/half.h: In function 'void f()':
/src/horovod/common/half.h:40:5: warning: unused variable 'error' [-Wunused-variable]
   40 |   int error: 3;
[ 41%] Building CXX object horovod/torch/CMakeFiles/pytorch.dir/adapter_v2.cc.o
FAILED: [code=1] horovod/torch/CMakeFiles/pytorch.dir/adapter_v2.cc.o
/usr/bin/c++ -DX -o horovod/torch/CMakeFiles/pytorch.dir/adapter_v2.cc.o -c /src/horovod/torch/adapter_v2.cc
/src/horovod/torch/adapter_v2.cc:21:10: fatal error: torch/none.h: No such file or directory
   21 | #include <torch/none.h>
/src/horovod/torch/adapter_v2.cc:22:1: error: 'second' does not name a type
ninja: build stopped: subcommand failed.
Traceback (most recent call last):
  File "/src/setup.py", line 120, in <module>
subprocess.CalledProcessError: Command '['cmake', '--build', '.']' returned non-zero exit status 1.
"""

CMAKE_ERROR = """\
-- Found MPI: TRUE
CMake Error at cmake/Modules/FindNCCL.cmake:47 (message):
  Could NOT find NCCL (missing:
  NCCL_LIBRARY)
Call Stack (most recent call first):
  CMakeLists.txt:240 (find_package)

-- Configuring incomplete, errors occurred!
subprocess.CalledProcessError: Command '['cmake', '..']' returned non-zero exit status 1.
"""

BROKEN_COMPILER = """\
-- Check for working CXX compiler: /usr/bin/c++ - broken
CMake Error at /cmake/CMakeTestCXXCompiler.cmake:73 (message):
  The C++ compiler

    "/usr/bin/c++"

  is not able to compile a simple test program.

  It fails with the following output:

    Change Dir: '/build/CMakeFiles/CMakeScratch'

    c++: error: unrecognized command-line option '-fnonsense'
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (NINJA_ERROR, "/src/horovod/torch/adapter_v2.cc:21:10: fatal error: torch/none.h: No such file or directory"),
        (
            CMAKE_ERROR,
            "CMake Error at cmake/Modules/FindNCCL.cmake:47 (message): Could NOT find NCCL (missing: NCCL_LIBRARY)",
        ),
        (BROKEN_COMPILER, "c++: error: unrecognized command-line option '-fnonsense'"),
        ("a.cc:(.text+0x1): undefined reference to `MPI_Init'\ncollect2: error: ld returned 1", "undefined reference"),
        ("/usr/bin/ld: cannot find -lmpi: No such file or directory\n", "cannot find -lmpi"),
        ('k.cu(12): error: identifier "x" is undefined\n', "k.cu(12): error"),
        ("\x1b[1ma.cc:1:2: \x1b[31merror: \x1b[0mbad\x1b[0m\n", "a.cc:1:2: error: bad"),
        ("x: fatal error: error writing to /tmp/a.s: No space left on device\n", "No space left on device"),
        ("Collecting cmake\nERROR: No matching distribution found for cmake==4\n", "No matching distribution"),
        (
            "Traceback (most recent call last):\n  File \"s\"\nModuleNotFoundError: No module named 'x'\n",
            "ModuleNotFoundError: No module named 'x'",
        ),
        ("all is well\nthe last line\n\n", "the last line"),
        ("", "it ended without saying why"),
    ],
)
def test_the_first_real_error_is_shown(text: str, expected: str) -> None:
    assert expected in first_error(text.splitlines(keepends=True))


def test_an_error_is_one_line_of_bounded_length() -> None:
    shown = first_error([f"a.cc:1:1: error: {'x ' * 1000}\n"])
    assert len(shown) <= LONGEST
    assert "\n" not in shown


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("c++: fatal error: Killed signal terminated program cc1plus\ncompilation terminated.\n", True),
        ("g++: internal compiler error: Killed (program cc1plus)\n", True),
        ("virtual memory exhausted: Cannot allocate memory\n", True),
        (NINJA_ERROR, False),
    ],
)
def test_a_compiler_that_ran_out_of_memory_is_recognised(text: str, expected: bool) -> None:
    assert is_out_of_memory(first_error(text.splitlines())) == expected
