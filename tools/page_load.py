"""How long the page's files take while 200 clients ask the model: python -m tools.page_load [--clients 200]

A tiny model is served in a process of its own. Every client asks it to write and, 0.2 s later, fetches main.js over
another connection; a client's time begins before it connects and ends with the answer's last byte.
"""

import argparse
import json
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.model.serving import folders

QUESTION = {"text": "The harbour moved the crane", "new_tokens": 60}


def sent(port: int, method: str, path: str, body: bytes = b"") -> tuple[float, socket.socket]:
    """When a client began, and its connection."""
    began = time.perf_counter()
    connection = socket.create_connection(("127.0.0.1", port))
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n"
    if body:
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    connection.sendall(f"{head}\r\n".encode() + body)
    return began, connection


def answers(*clients: list[tuple[float, socket.socket]]) -> list[list[tuple[float, int]]]:
    """Seconds and status of each, of each list in the order in which they end."""
    waiting, heads, ended = selectors.DefaultSelector(), {}, [[] for _ in clients]
    for began, connection, of in [(*client, of) for of, some in zip(ended, clients, strict=True) for client in some]:
        waiting.register(connection, selectors.EVENT_READ, (began, of))
    while waiting.get_map():
        for key, _ in waiting.select():
            data = key.fileobj.recv(1 << 16)
            head = heads.setdefault(key.fileobj, data[:20])
            if not data:
                waiting.unregister(key.fileobj)
                key.fileobj.close()
                began, of = key.data
                of.append((time.perf_counter() - began, int(head.split()[1])))
    return ended


def said(name: str, times: list[tuple[float, int]]) -> None:
    seconds = sorted(seconds for seconds, _ in times)
    parts = {"median": 0.5, "95%": 0.95, "worst": 1.0}
    told = ", ".join(f"{part} {1e3 * seconds[int(at * (len(seconds) - 1))]:.0f} ms" for part, at in parts.items())
    statuses = ", ".join(
        f"{count} of status {status}" for status, count in sorted(Counter(s for _, s in times).items())
    )
    print(f"{name}: {told} ({statuses})", flush=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--clients", type=int, default=200)
    clients = parser.parse_args().clients
    with tempfile.TemporaryDirectory() as folder:
        folders.retro(Path(folder))
        command = [sys.executable, "-m", "retro_model", "serve", folder, "--port", "0", "--no-browser"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            port = int(server.stdout.readline().split("127.0.0.1:")[1].split()[0])
            file = (port, "GET", "/page/main.js")
            answers([sent(*file)])  # the server runs
            said("one client, nobody else", [answers([sent(*file)])[0][0] for _ in range(20)])
            said(f"{clients} clients, the model idle", *answers([sent(*file) for _ in range(clients)]))
            question = json.dumps(QUESTION).encode()
            asked = [sent(port, "POST", "/api/write", question) for _ in range(clients)]
            time.sleep(0.2)
            files, questions = answers([sent(*file) for _ in range(clients)], asked)
            said(f"{clients} clients, the model busy", files)
            said("their questions", questions)
            server.terminate()


if __name__ == "__main__":
    main()
