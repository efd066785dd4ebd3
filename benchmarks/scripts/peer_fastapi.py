"""A plain FastAPI endpoint around the MLP, as people write one: prints its port, and serves until it is ended."""

import json
import socket

import torch
import uvicorn
from fastapi import FastAPI
from served_mlp import make_model

app, model = FastAPI(), make_model()
torch.set_num_threads(1)


@app.post("/predict")
def predict(row: list[float]) -> dict[str, list[float]]:
    with torch.no_grad():
        return {"output": model(torch.tensor([row]))[0].tolist()}


with socket.create_server(("127.0.0.1", 0)) as listening:
    print(json.dumps({"port": listening.getsockname()[1]}), flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run([listening])
