"""LitServe around the MLP: prints its port when it answers, and serves until it is ended."""

import json
import socket
import threading
import time

import litserve
import torch
from served_mlp import make_model


class Api(litserve.LitAPI):
    def setup(self, device) -> None:
        torch.set_num_threads(1)
        self.model = make_model()

    def decode_request(self, request):
        return torch.tensor([request])

    def predict(self, x):
        with torch.no_grad():
            return self.model(x)

    def encode_response(self, output):
        return {"output": output[0].tolist()}


def tell(port: int) -> None:
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            break
        except OSError:
            time.sleep(0.1)
    print(json.dumps({"port": port}), flush=True)


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    threading.Thread(target=tell, args=(port,), daemon=True).start()
    server = litserve.LitServer(Api(), accelerator="cpu", workers_per_device=1)
    server.run(host="127.0.0.1", port=port, generate_client_file=False, log_level="error")
