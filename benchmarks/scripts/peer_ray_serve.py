"""Ray Serve around the MLP, one replica: prints its port when it answers, and serves until it is ended."""

import json
import signal
import socket

import ray
import torch
from ray import serve
from served_mlp import make_model
from starlette.requests import Request


@serve.deployment(ray_actor_options={"num_cpus": 1})
class Served:
    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.model = make_model()

    async def __call__(self, request: Request) -> dict[str, list[float]]:
        row = await request.json()
        with torch.no_grad():
            return {"output": self.model(torch.tensor([row]))[0].tolist()}


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ray.init(include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(Served.bind(), route_prefix="/predict")
    print(json.dumps({"port": port}), flush=True)
    signal.sigwait([signal.SIGTERM, signal.SIGINT])
    ray.shutdown()
