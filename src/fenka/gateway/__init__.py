"""Program: the address of a service whose replicas come and go. It passes each request to one replica.

llhttp (httptools) parses HTTP/1.1, and asyncio's protocols pass on bodies as they come. One core thus
serves three times as many requests as with aiohttp or h11 on both sides. HTTP/2 without TLS, as gRPC uses it
inside a cluster, is understood by h2 on both sides, so each call gets a replica of its own.

Passing on the bytes of a connection would cost less. But a gRPC client has one connection: all its calls
would go to one replica, whatever the weights, and none could be counted. docs/measurements/figures.md#serving has
the figures.
"""
