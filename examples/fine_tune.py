"""Fine-tune a causal language model of Hugging Face, whole or with LoRA, and write it as `save_pretrained` does.

paral fit --config configs/fine-tune.yaml

Without a `pretrained` model, a small one is made, so that nothing has to be downloaded.
"""

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel


class FineTuned(LightningModule):
    """A causal language model, which the end of the fit writes to a folder.

    Args:
        folder: the folder to write; with LoRA, that of the adapter.
        pretrained: a folder, or a name on the hub. `None`: a small GPT-2 with random weights.
        num_layers: of the small one.
        lora_rank: the rank of the adapter, for which `peft` is needed. 0: all weights are trained.
        learning_rate: that of AdamW.
    """

    def __init__(
        self,
        folder: str,
        pretrained: str | None = None,
        num_layers: int = 2,
        lora_rank: int = 0,
        learning_rate: float = 1e-3,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = None

    def configure_model(self) -> None:
        """Load the model here, so that no rank copies all of it under FSDP and ZeRO-3."""
        if self.model is not None:
            return
        if self.hparams["pretrained"] is None:
            small = {"n_embd": 64, "n_head": 2, "n_positions": 128, "vocab_size": 256}
            ends = {"bos_token_id": 0, "eos_token_id": 0}
            self.model = GPT2LMHeadModel(GPT2Config(n_layer=self.hparams["num_layers"], **small, **ends))
        else:
            self.model = AutoModelForCausalLM.from_pretrained(self.hparams["pretrained"])
        if self.hparams["lora_rank"]:
            from peft import LoraConfig, get_peft_model  # here, because it is optional

            self.model = get_peft_model(self.model, LoraConfig(r=self.hparams["lora_rank"], task_type="CAUSAL_LM"))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a batch of tokens; the model shifts the targets itself."""
        loss = self.model(input_ids=batch[0], labels=batch[0]).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Train what requires a gradient: with LoRA, only the adapter."""
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=self.hparams["learning_rate"])

    def on_train_end(self) -> None:
        """Gather the weights on all ranks, and write them on one."""
        state = self.trainer.strategy.full_state_dict(self.model)
        if self.trainer.is_global_zero:
            self.model.save_pretrained(self.hparams["folder"], state_dict=state)
