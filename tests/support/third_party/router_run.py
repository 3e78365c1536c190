"""Run by a router's own interpreter: the router as it is published before a service, and all kinds of calls through it.

Prints how many were answered of how many; the router adds its own defaults to each of their bodies.
"""

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

module, url, model = sys.argv[1:]
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
BODIES = [
    ("/v1/completions", {"prompt": "abc", "max_tokens": 4}),
    ("/v1/completions", {"prompt": "abc", "max_tokens": 4, "stream": True}),
    ("/v1/completions", {"prompt": "abc", "max_tokens": 4, "temperature": 0.5, "stop": ["x"], "n": 2}),
    ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 4}),
    ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 4, "stream": True,
                              "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 4, "logprobs": True, "top_logprobs": 2, "seed": 1}),
    ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 4, "response_format": {"type": "json_object"}}),
    ("/v1/chat/completions", {"messages": [*HELLO, {"role": "assistant", "content": "Hi"}, *HELLO], "max_tokens": 4}),
]  # fmt: skip


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def call(address: str, path: str, body: dict[str, object] | None = None) -> tuple[int, str]:
    data = None if body is None else json.dumps({"model": model, **body}).encode()
    request = urllib.request.Request(address + path, data, {"Content-Type": "application/json"})
    try:
        with OPENER.open(request, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def answered(path: str, body: dict[str, object], status: int, text: str) -> bool:
    """Whole, and without an error in it."""
    if status != 200:
        return False
    if body.get("stream"):
        return "data: [DONE]" in text and '"error"' not in text
    return bool(json.loads(text)["choices"])


port, metrics = free_port(), free_port()
command = [sys.executable, "-m", module, "--host", "127.0.0.1", "--port", str(port), "--worker-urls", url]
command += ["--prometheus-port", str(metrics), "--policy", "round_robin", "--disable-retries"]
router = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
address = f"http://127.0.0.1:{port}"
try:
    while True:
        assert router.poll() is None, router.stdout.read()
        try:
            if call(address, "/health")[0] == 200 and call(address, *BODIES[0])[0] != 503:
                break
        except (urllib.error.URLError, ConnectionError):
            pass
        time.sleep(0.2)
    failed = []
    for path, body in BODIES * 5:
        status, text = call(address, path, body)
        if not answered(path, body, status, text):
            failed.append((path, body, status, text[:500]))
    print(f"{len(BODIES) * 5 - len(failed)} of {len(BODIES) * 5} answered")
    for one in failed[:4]:
        print(one)
finally:
    router.terminate()
    router.wait(20)
