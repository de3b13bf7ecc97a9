"""A stand-in for vLLM's API server: it has a second process like vLLM, answers what a cluster asks, and logs it."""

import json
import os
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

REPORT = {
    "dilation": 8.0,
    "steps": 10,
    "steps_late": 0,
    "steps_very_late": 0,
    "lateness_p50_s": 0.001,
    "lateness_p99_s": 0.002,
    "lateness_max_s": 0.002,
    "re_anchored": 0,
    "re_anchored_s": 0.0,
    "kept": True,
    "handoffs": 3,
    "handoffs_late": 0,
}


def flag(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.answer({})

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("content-length") or 0))
        body = json.loads(content) if content else {}
        sys.stderr.write(f"{self.path} {json.dumps({**body, 'prompt': len(body.get('prompt', []))})}\n")
        if self.path == "/collective_rpc":
            self.answer({"results": [REPORT if body["method"] == "pacing_report" else None]})
        elif self.path == "/reset_prefix_cache":
            self.answer({"success": True})
        else:
            choices = [{"text": "ab", "finish_reason": "length"}]
            usage = {"prompt_tokens": 1, "completion_tokens": 1}
            params = {"from": flag("--port")} if body.get("kv_transfer_params", {}).get("do_remote_decode") else None
            self.answer({"choices": choices, "usage": usage, "kv_transfer_params": params})

    def answer(self, body: object) -> None:
        content = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        """Say nothing of each request."""


def main() -> None:
    failing = os.environ.get("STUB_FAILS")
    if failing == os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"]:
        sys.exit("ValueError: the stub was told to fail")
    core = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)  # engine core"])

    def end(*_: object) -> None:
        core.kill()
        core.wait()
        sys.exit(0)

    signal.signal(signal.SIGTERM, end)
    ThreadingHTTPServer((flag("--host"), int(flag("--port"))), Handler).serve_forever()


if __name__ == "__main__":
    main()
