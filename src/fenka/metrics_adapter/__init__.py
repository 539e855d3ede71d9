"""Program: serves figures of services to autoscalers, as the API external.metrics.k8s.io.

The parts, from the bottom: `wire.py` (what is served), `exposition.py` (what pods answer), `pods.py` (which
pods are asked, and where) and `gateway_figures.py` (what they mean) are pure. `scraper.py` asks pods,
`response.py` reads their HTTP. `values.py` has the metrics. `front_proxy.py` knows the API server's
certificate, `registration.py` whether the API is this program's. `server.py` is HTTP, `main.py` the wiring.

Everything that pods answer is written by tenants. A pod costs a bounded number of bytes, samples and
seconds, and each namespace has a number of connections of its own. What cannot be had exactly is an error:
an autoscaler then keeps the number of replicas, whereas a number that is too low would end some that are
needed.

The program keeps no state. It lists the pods for each value, so it needs neither a watch nor memory for all
pods of a cluster.
"""
