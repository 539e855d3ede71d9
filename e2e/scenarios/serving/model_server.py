"""Serve a model whose weights are on the card, and which launches a kernel for each request.

    model_server.py [--version V] [--weights-mib N] [--cost-us N]

The answer to a number is its product with the weights' first element, which is read from the card.

POST /predict    {"input": 7} → {"version": "v1", "output": 21}
GET /stream?count=N     server-sent events, a kernel each
GET /echo        a websocket that answers each number
POST /crash      ends the process at once
GET /healthz, and /metrics with the gauge model_requests
gRPC: Predict, and Count, which streams the products of 1 to N; numbers are text
"""

import argparse
import asyncio
import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
from aiohttp import WSMsgType, web
from numba import cuda

WEIGHT = 3
warnings.simplefilter("ignore")


@cuda.jit
def multiply(weights, products):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Multiply; on a simulated card only its time counts."""
    index = cuda.grid(1)
    if index < products.size:
        products[index] *= weights[index]


class Model:
    """Weights on a card. One thread makes all calls of the driver."""

    def __init__(self, version: str, weights_mib: int) -> None:
        self.version, self.running = version, 0
        self._card = ThreadPoolExecutor(1)
        self._card.submit(self._load, weights_mib).result()

    def _load(self, weights_mib: int) -> None:
        self._weights = cuda.device_array(weights_mib << 18, np.int32)
        self._head, self._products = self._weights[:256], cuda.device_array(256, np.int32)
        self._head.copy_to_device(np.full(256, WEIGHT, np.int32))
        self._multiply(1)

    def _multiply(self, number: int) -> int:
        multiply[1, 256](self._head, self._products)
        cuda.synchronize()
        return number * int(self._head.copy_to_host()[0])

    async def predict(self, number: int) -> int:
        """Return the product of a number and the weight."""
        self.running += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._card, self._multiply, number)
        finally:
            self.running -= 1


MODEL = web.AppKey("model", Model)
routes = web.RouteTableDef()


@routes.post("/predict")
async def predict(request: web.Request) -> web.Response:
    """Answer one request."""
    model = request.app[MODEL]
    output = await model.predict((await request.json())["input"])
    return web.json_response({"version": model.version, "output": output})


@routes.get("/stream")
async def stream(request: web.Request) -> web.StreamResponse:
    """Send one event for each number up to `count`."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for number in range(1, int(request.query["count"]) + 1):
        product = await request.app[MODEL].predict(number)
        await response.write(f"data: {product}\n\n".encode())
    return response


@routes.get("/echo")
async def echo(request: web.Request) -> web.WebSocketResponse:
    """Answer each message of a websocket."""
    socket = web.WebSocketResponse()
    await socket.prepare(request)
    async for message in socket:
        if message.type == WSMsgType.TEXT:
            await socket.send_str(str(await request.app[MODEL].predict(int(message.data))))
    return socket


@routes.post("/crash")
async def crash(_request: web.Request) -> web.Response:
    """End the process as a crash does."""
    os._exit(70)


@routes.get("/healthz")
async def healthz(_request: web.Request) -> web.Response:
    """Answer when the weights are loaded."""
    return web.Response(text="ok\n")


@routes.get("/metrics")
async def metrics(request: web.Request) -> web.Response:
    """Return the number of requests that are being answered."""
    running = request.app[MODEL].running
    return web.Response(text=f"# TYPE model_requests gauge\nmodel_requests {running}\n")


async def serve_grpc(app: web.Application) -> None:
    """Listen for gRPC on the same model."""
    model = app[MODEL]

    async def predict_one(number: bytes, _context: object) -> bytes:
        return b"%d" % await model.predict(int(number))

    async def count(last: bytes, context: "grpc.aio.ServicerContext[bytes, bytes]") -> None:
        for number in range(1, int(last) + 1):
            await context.write(b"%d" % await model.predict(number))

    methods: dict[str, Any] = {
        "Predict": grpc.unary_unary_rpc_method_handler(predict_one),
        "Count": grpc.unary_stream_rpc_method_handler(count),
    }
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("model.Model", methods),))
    server.add_insecure_port(f"0.0.0.0:{os.environ.get('GRPC_PORT', '8001')}")
    await server.start()
    app.on_cleanup.append(lambda _: server.stop(grace=30))


def main() -> None:
    """Load the model and serve it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--version", default="v1")
    parser.add_argument("--weights-mib", type=int, default=1024)
    parser.add_argument("--cost-us", type=int, default=2000)
    options = parser.parse_args()
    # How long each kernel takes on a simulated card.
    os.environ["FENKA_SIMULATED_KERNEL_US"] = str(options.cost_us)
    app = web.Application()
    app[MODEL] = Model(options.version, options.weights_mib)
    app.add_routes(routes)
    app.on_startup.append(serve_grpc)
    web.run_app(app, port=int(os.environ.get("PORT", "8000")), print=None, access_log=None)


main()
