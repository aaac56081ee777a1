"""retro-reader serve FOLDER: serve a page that shows the passages a trained model looks up, and their gain."""

from __future__ import annotations

import gc
import socket
import sys
import webbrowser

from retro_model.base.progress import printable

from .options import FIRST_PORT, HOST, serve

MOST_CONNECTIONS = 1000
LONGEST_HEAD = 16 << 10  # bytes


def listen(port: int | None) -> socket.socket:
    """Return a listening socket on the loopback address. port: None: the first free one from `FIRST_PORT`; 0: any."""
    for number in range(FIRST_PORT, FIRST_PORT + 20) if port is None else (port,):
        made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            made.bind((HOST, number))
            made.listen(MOST_CONNECTIONS)  # connections before the server runs wait
        except (OSError, OverflowError):  # taken, or no number of a port
            made.close()
            continue
        return made
    tried = f"{FIRST_PORT} to {FIRST_PORT + 19}" if port is None else port
    sys.exit(f"retro-reader serve: --port: expected a free port, from 0 to 65535; got {tried}")


def main(arguments: list[str] | None = None) -> None:
    """Run `retro-reader serve`."""
    options = serve().parse_args(arguments)
    try:
        import uvicorn

        from .app import make_app
    except ImportError as error:
        sys.exit(f"retro-reader serve: {error}; pip install retro-reader")
    from retro_model.folders.reader import open_folder

    try:
        reader = open_folder(options.folder, options.device)
    except (FileNotFoundError, ValueError) as error:
        sys.exit(printable(f"retro-reader serve: {error}"))
    with listen(options.port) as server_socket:
        address = f"http://{HOST}:{server_socket.getsockname()[1]}"
        print(f"{printable(reader.folder.title)}: {address}  (this machine only; Ctrl-C ends it)", flush=True)
        if not options.no_browser:
            webbrowser.open(address)
        limits = {"limit_concurrency": MOST_CONNECTIONS, "timeout_keep_alive": 10}
        limits |= {"http": "h11", "h11_max_incomplete_event_size": LONGEST_HEAD, "ws": "none", "log_level": "warning"}
        config = uvicorn.Config(make_app(reader), **limits)
        gc.collect()
        gc.freeze()  # without this each full collection visits every imported object while clients wait
        uvicorn.Server(config).run(sockets=[server_socket])
