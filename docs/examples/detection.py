"""Detection with torchvision, whose networks return their losses: `python -m runner workload=detection.py`."""

import torch
from torch import nn
from torch.utils.data import Dataset
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.rpn import AnchorGenerator
from torchvision.ops import box_iou


class Squares(Dataset):
    """Images with one bright square each."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        image, size = torch.rand(3, 64, 64) / 4, int(torch.randint(16, 32, ()))
        x, y = torch.randint(0, 64 - size, (2,)).tolist()
        image[:, y : y + size, x : x + size] = 1
        return image, {"boxes": torch.tensor([[x, y, x + size, y + size]]).float(), "labels": torch.tensor([1])}


def model():
    backbone = nn.Sequential(nn.Conv2d(3, 16, 3, 4, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU())
    backbone.out_channels = 32
    anchors = AnchorGenerator(sizes=((24,),), aspect_ratios=((1.0,),))
    sizes = {"min_size": 64, "max_size": 64, "rpn_batch_size_per_image": 10000, "box_batch_size_per_image": 10000}
    return FasterRCNN(backbone, 2, rpn_anchor_generator=anchors, **sizes)  # so many that nothing is drawn at random


data = Squares


def collate(samples):
    images, targets = zip(*samples, strict=True)
    return list(images), list(targets)


def training_step(model, batch):
    # One image at a time: torchvision's losses are means over the boxes of a batch, and not over its images.
    each = [model([image], [target]) for image, target in zip(*batch, strict=True)]
    losses = {name: torch.stack([losses[name] for losses in each]).mean() for name in each[0]}
    return {"loss": sum(losses.values()), **losses}


def evaluation_step(model, batch):
    images, targets = batch
    overlaps = []
    for found, target in zip(model(images), targets, strict=True):
        each = box_iou(target["boxes"], found["boxes"])
        overlaps.append(each.max() if each.numel() else each.sum())
    overlap = torch.stack(overlaps).mean()
    return {"loss": 1 - overlap, "overlap": overlap}
