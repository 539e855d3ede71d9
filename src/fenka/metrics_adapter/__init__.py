"""Program: serves figures of services to autoscalers, as the API external.metrics.k8s.io.

Everything that pods answer is written by tenants. A pod costs a bounded number of bytes, samples and
seconds, and each namespace has a number of connections of its own. What cannot be had exactly is an error:
an autoscaler then keeps the number of replicas, whereas a number that is too low would end some that are
needed.

The program keeps no state. It lists the pods for each value, so it needs neither a watch nor memory for all
pods of a cluster.
"""
