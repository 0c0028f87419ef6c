"""One rank of ``hvdkit.notebook``: an IPython shell that runs the cells which the notebook sends."""

import base64
import json
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Mapping
from typing import Any

from hvdkit.jobs import function

END = "\x1e"
"""Stands before the number of a cell, in the line by which a rank ends what the cell wrote to an output."""


class RankShell:
    """The shell, and its connection to the notebook.

    Attributes:
        rank: which one this is.
    """

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank = rank
        self._received, self._sent = connection.makefile("rb"), connection.makefile("wb")
        self._sending = threading.Lock()
        self._cells: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        self._main = threading.get_ident()
        self._running = False

    def serve(self) -> None:
        """Run cells until the notebook wants no more of them."""
        backend = "module://matplotlib_inline.backend_inline" if self.rank == 0 else "agg"
        os.environ.setdefault("MPLBACKEND", backend)
        shell = self._shell()
        signal.signal(signal.SIGINT, self._interrupt)
        function.send(self._sent, str(self.rank).encode())
        self._tell(kind="ready", pid=os.getpid(), host=socket.gethostname())
        threading.Thread(target=self._listen, daemon=True).start()
        while (cell := self._cells.get()) is not None:
            self._running = True
            try:
                result = shell.run_cell(cell["source"], store_history=True)
                error = result.error_before_exec or result.error_in_exec
            except KeyboardInterrupt as interrupt:  # in the shell's own code
                error = interrupt
            self._running = False
            for fd, stream in enumerate((sys.stdout, sys.stderr), start=1):
                stream.flush()
                os.write(fd, f"{END}{cell['cell']}\n".encode())
            said = "" if error is None else ": ".join(filter(None, (type(error).__name__, str(error))))
            self._tell(kind="done", cell=cell["cell"], error=said.partition("\n")[0])

    def _shell(self) -> Any:
        from IPython.core.interactiveshell import InteractiveShell
        from traitlets.config import Config

        shell: Any = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}), colors="nocolor")
        print_result = shell.displayhook.write_format_data

        def show_result(data: Any, metadata: Any = None) -> None:
            if len(data) > 1:
                self._publish(data, metadata)
            else:
                print_result(data, metadata)

        shell.displayhook.write_format_data = show_result
        shell.displayhook.write_output_prompt = lambda: None  # the rank stands there
        shell.display_pub.publish = self._publish
        return shell

    def _publish(
        self, data: Mapping[str, Any], metadata: Any = None, *, transient: Any = None, update: bool = False, **_: Any
    ) -> None:
        """Show something: on the root in the notebook, on other ranks as text, without pictures."""
        if self.rank == 0:
            sent = {name: base64.b64encode(it).decode() if isinstance(it, bytes) else it for name, it in data.items()}
            self._tell(kind="display", data=sent, metadata=metadata or {}, transient=transient or {}, update=update)
        elif "text/plain" in data and not any(name.startswith("image/") for name in data):
            sys.stdout.write(f"{data['text/plain']}\n")

    def _tell(self, **message: Any) -> None:
        with self._sending:
            function.send(self._sent, json.dumps(message).encode())

    def _listen(self) -> None:
        """Take what the notebook says, also while a cell runs."""
        try:
            while (message := json.loads(function.receive(self._received)))["kind"] != "stop":
                if message["kind"] == "run":
                    self._cells.put(message)
                else:
                    self._tell(kind="stacks", text=self._stack())
                    signal.pthread_kill(self._main, signal.SIGINT)
        except OSError:  # the notebook is gone
            os._exit(0)
        if self._running:
            os._exit(0)  # the main thread may wait for another rank in C++
        self._cells.put(None)

    def _stack(self) -> str:
        """Where the main thread is, from the cell on."""
        frames = traceback.extract_stack(sys._current_frames()[self._main])
        cell = next((i for i, frame in enumerate(frames) if frame.filename.startswith("<ipython-input")), 0)
        return "".join(traceback.StackSummary.from_list(frames[cell:]).format())

    def _interrupt(self, *_: object) -> None:
        if self._running:
            raise KeyboardInterrupt


if __name__ == "__main__":
    RankShell(*function.connect(sys.argv[1])).serve()
