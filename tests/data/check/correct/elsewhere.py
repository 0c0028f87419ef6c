"""What other modules do cannot be seen here: undecided, and no finding."""

import horovod.torch as hvd
from engine import train_one_epoch
from setup_tools import *

hvd.init()
args = parse_arguments()
model, optimizer = build(args)
loader = make_loader(args)
for epoch in range(args.epochs):
    train_one_epoch(model, optimizer, loader, epoch)
    if should_save(epoch):
        save_checkpoint(model, epoch)
