"""A training that writes its losses where TensorBoard reads them."""

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

writer = EventFileWriter("/data/logs")
for step in range(3):
    loss = Summary.Value(tag="loss", simple_value=1 / (step + 1))
    writer.add_event(Event(step=step, summary=Summary(value=[loss])))
writer.close()
