"""Modules with several optimizers, such as GANs and actor-critics, and a function that fits them."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from tests.models.regression import FEATURES, regression_data
from tests.running import quiet_trainer

Fitted = tuple[list[float], dict[str, Tensor]]


class Several(LightningModule):
    """Base class: manual optimization, and a list of losses."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.losses: list[float] = []

    def descend(self, loss: Tensor) -> None:
        self.losses.append(loss.item())
        self.manual_backward(loss)


class GAN(Several):
    """The generator's loss also gives gradients to the discriminator, which must not affect its step.

    Some parameters belong to no optimizer: they get gradients, are frozen, or are not used.
    """

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, FEATURES))
        self.discriminator = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 1))
        self.blurred = nn.Linear(FEATURES, FEATURES).requires_grad_(False)
        self.nobodys = nn.Parameter(torch.ones(1))
        self.unused = nn.Linear(2, 2)

    def generator_loss(self, real: Tensor) -> Tensor:
        fake = self.discriminator(self.generator(self.blurred(real.sin())) * self.nobodys)
        return binary_cross_entropy_with_logits(fake, torch.ones_like(fake))

    def discriminator_loss(self, real: Tensor) -> Tensor:
        fake = self.discriminator(self.generator(self.blurred(real.sin())).detach())
        true = self.discriminator(real)
        of_fake = binary_cross_entropy_with_logits(fake, torch.zeros_like(fake))
        return (binary_cross_entropy_with_logits(true, torch.ones_like(true)) + of_fake) / 2

    def configure_optimizers(self) -> Any:
        weights = [p for p in self.discriminator.parameters() if p.dim() > 1]
        biases = [p for p in self.discriminator.parameters() if p.dim() == 1]
        generator = torch.optim.Adam(self.generator.parameters(), lr=1e-2, betas=(0.5, 0.999))
        discriminator = torch.optim.AdamW([{"params": weights}, {"params": biases, "lr": 5e-3}], lr=2e-2)
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in (generator, discriminator)]
        return [generator, discriminator], schedulers


class Toggled(GAN):
    """Lightning's example: each step freezes the parameters of the other optimizer. Clips, and has schedulers."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        generator, discriminator = self.optimizers()
        for optimizer, loss, limit in (
            (generator, self.generator_loss, (0.05, "norm")),
            (discriminator, self.discriminator_loss, (0.02, "value")),
        ):
            with optimizer.toggle_model():
                self.descend(loss(batch[0]))
                self.clip_gradients(optimizer, *limit)
                optimizer.step()
                optimizer.zero_grad()
        for scheduler in self.lr_schedulers():
            scheduler.step()


class InTurns(GAN):
    """`toggle_optimizer` and `untoggle_optimizer`, with two backward passes of the discriminator."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        generator, discriminator = self.optimizers()
        self.toggle_optimizer(generator)
        generator.zero_grad()
        self.descend(self.generator_loss(batch[0]))
        generator.step()
        self.untoggle_optimizer(generator)
        self.toggle_optimizer(discriminator)
        discriminator.zero_grad()
        for _ in range(2):
            self.descend(0.5 * self.discriminator_loss(batch[0]))
        discriminator.step()
        self.untoggle_optimizer(discriminator)


class Plain(GAN):
    """Toggles nothing; the discriminator's `zero_grad` drops the gradients of the generator's loss."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        generator, discriminator = self.optimizers()
        generator.zero_grad()
        self.descend(self.generator_loss(batch[0]))
        generator.step()
        discriminator.zero_grad()
        self.descend(self.discriminator_loss(batch[0]))
        discriminator.step()


class Wasserstein(GAN):
    """Takes two steps of the critic, with clamped weights, for each of the generator; freezes by `requires_grad`."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        generator, critic = self.optimizers()

        def closure() -> None:
            critic.zero_grad()
            self.descend(
                self.discriminator(self.generator(batch[0]).detach()).mean() - self.discriminator(batch[0]).mean()
            )

        critic.step(closure=closure)
        for parameter in self.discriminator.parameters():
            parameter.data.clamp_(-0.2, 0.2)
        if batch_idx % 2:
            self.discriminator.requires_grad_(False)
            generator.zero_grad()
            self.descend(self.generator_loss(batch[0]))
            generator.step()
            self.discriminator.requires_grad_(True)


class Accumulating(Several):
    """One optimizer, which steps and clips after every second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 2))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.descend((self.net(batch[0]) - batch[1]).square().mean() / 2)
        if batch_idx % 2:
            self.clip_gradients(optimizer, 0.05, "norm")
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.net.parameters(), lr=1e-2)


class ActorCritic(Several):
    """One loss trains both. The critic's loss also trains the actor's trunk. A third optimizer trains a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(FEATURES, 16)
        self.actor, self.critic = nn.Linear(16, 2), nn.Linear(16, 1)
        self.log_std = nn.Parameter(torch.zeros(1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        inputs, targets = batch
        hidden = self.trunk(inputs).tanh()
        advantage = targets[:, :1] - self.critic(hidden)
        error = (self.actor(hidden) - targets).square() * (-2 * self.log_std).exp()
        loss = (error + 2 * self.log_std).mean() + advantage.square().mean()
        self.zero_grad()
        self.descend(loss)
        for optimizer in self.optimizers():
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()

    def configure_optimizers(self) -> Any:
        actors = [*self.trunk.parameters(), *self.actor.parameters()]
        return [torch.optim.AdamW(each, lr=1e-2) for each in (actors, self.critic.parameters(), [self.log_std])]


KINDS = {kind.__name__: kind for kind in (Toggled, InTurns, Plain, Wasserstein, ActorCritic)}


def fit(model: Any, num_ranks: int, num_batches: int = 6, **options: Any) -> Fitted:
    """Fit `model` from fixed initial weights; return this rank's losses and the final weights."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((torch.rand(parameter.shape, generator=generator) - 0.5) / 2)
    trainer = quiet_trainer(**({"max_epochs": 1, "devices": num_ranks} | options))
    trainer.fit(model, regression_data(num_batches, num_ranks))
    return model.losses, {name: weight.detach().clone() for name, weight in model.state_dict().items()}
