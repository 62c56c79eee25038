"""The keys of the run config that belong to one method each; they begin with its name."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from tepal.server_app.config.common import keys


class FedFrozenConfig(BaseModel):
    """Keys of FedFrozen."""

    model_config = keys("fedfrozen.")

    warmup_rounds: int = Field(6, ge=0, description="rounds before query and key projections are frozen")
    ridge: float = Field(0.0, ge=0, allow_inf_nan=False, description="λ of (λ/2)·‖W_V‖² on the value projections")


class SelectiveConfig(BaseModel):
    """Keys of selective layer fine-tuning."""

    model_config = keys("selective.")

    budget: float = Field(1.0, gt=0, allow_inf_nan=False, description="of every client, in what selective.costs says")
    draw_budgets: bool = Field(False, description="each client has its own budget, 1 to 4 layers, drawn by its name")
    selection: Literal["gradient", "snr", "rgn", "top", "bottom", "both", "full"] = Field(
        "gradient", description="how a client's layers are chosen"
    )
    coupling: float = Field(10.0, ge=0, allow_inf_nan=False, description="λ of (P1): the price of choosing differently")
    distance: Literal["hamming", "squared"] = Field("hamming", description="of two clients' choices in (P1)")
    costs: Literal["layers", "bytes", "milliseconds"] = Field("layers", description="what a layer costs of the budget")
    probe_batches: int = Field(1, ge=0, description="batches of the gradient that a client is asked for; 0: all")


class FedEnsembleConfig(BaseModel):
    """Keys of Fed-ensemble."""

    model_config = keys("fedensemble.")

    modes: int = Field(3, ge=1, le=1000, description="K, models in the ensemble")
    strata: int = Field(0, ge=0, description="Q, groups of clients; 0: as many as clients train in a round")
    member: Literal["fedavg", "fedfrozen", "selective"] = Field("fedavg", description="what a mode is trained with")
    weighting: Literal["uniform", "examples"] = Field("uniform", description="of the clients that had the same mode")
    assign: Literal["schedule", "highest-loss"] = Field(
        "schedule", description="which mode a client gets: by turns, or that with the highest loss on its tests"
    )


class FedACSConfig(BaseModel):
    """Keys of FedACS."""

    model_config = keys("fedacs.")

    quantile: float = Field(0.5, gt=0, lt=1, description="p, share of the similarities that are too small to count")
    alpha: float = Field(1.0, gt=0, le=1, description="α, how far a client goes from its own model to the mixture")


class FedProxConfig(BaseModel):
    """Keys of FedProx."""

    model_config = keys("fedprox.")

    mu: float = Field(0.01, ge=0, allow_inf_nan=False, description="μ of (μ/2)·‖w − w_received‖² on what trains")


class FedAvgMConfig(BaseModel):
    """Keys of FedAvgM."""

    model_config = keys("fedavgm.")

    learning_rate: float = Field(1.0, gt=0, allow_inf_nan=False, description="η of the server; 1 as in FedAvg")
    momentum: float = Field(0.9, ge=0, lt=1, description="β of the server")


class FedAdagradConfig(BaseModel):
    """Keys of FedAdagrad."""

    model_config = keys("fedadagrad.")

    learning_rate: float = Field(0.1, gt=0, allow_inf_nan=False, description="η of the server")
    beta1: float = Field(0.0, ge=0, lt=1, description="β₁, of the first moment")
    tau: float = Field(1e-3, gt=0, allow_inf_nan=False, description="τ, how adaptive: the smaller, the more")


class FedYogiConfig(BaseModel):
    """Keys of FedYogi."""

    model_config = keys("fedyogi.")

    learning_rate: float = Field(0.01, gt=0, allow_inf_nan=False, description="η of the server")
    beta1: float = Field(0.9, ge=0, lt=1, description="β₁, of the first moment")
    beta2: float = Field(0.99, ge=0, lt=1, description="β₂, of the second")
    tau: float = Field(1e-3, gt=0, allow_inf_nan=False, description="τ, how adaptive: the smaller, the more")


class FedAdamConfig(FedYogiConfig):
    """Keys of FedAdam."""

    model_config = keys("fedadam.")


class ScaffoldConfig(BaseModel):
    """Keys of SCAFFOLD."""

    model_config = keys("scaffold.")

    learning_rate: float = Field(1.0, gt=0, allow_inf_nan=False, description="η_g of the server")


class DittoConfig(BaseModel):
    """Keys of Ditto."""

    model_config = keys("ditto.")

    lam: float = Field(
        1.0, ge=0, allow_inf_nan=False, alias="ditto.lambda", description="λ, how near own models stay to the global"
    )


class PerFedAvgConfig(BaseModel):
    """Keys of Per-FedAvg."""

    model_config = keys("perfedavg.")

    alpha: float = Field(0.01, ge=0, allow_inf_nan=False, description="α, size of a client's own step")
    gradient: Literal["first-order", "hessian-free"] = Field(
        "first-order", description="whether the second derivative is left out, or taken from a difference of gradients"
    )
    delta: float = Field(1e-3, gt=0, allow_inf_nan=False, description="δ, step of that difference")


class PFedMeConfig(BaseModel):
    """Keys of pFedMe."""

    model_config = keys("pfedme.")

    lam: float = Field(
        15.0, gt=0, allow_inf_nan=False, alias="pfedme.lambda", description="λ, how near own models stay to the global"
    )
    inner_steps: int = Field(5, ge=1, description="K, steps that find a client's own model for one batch")
    inner_learning_rate: float = Field(0.01, gt=0, allow_inf_nan=False, description="of these steps")
    beta: float = Field(1.0, gt=0, allow_inf_nan=False, description="β, how far the server goes to the clients' mean")


class APFLConfig(BaseModel):
    """Keys of APFL."""

    model_config = keys("apfl.")

    alpha: float = Field(0.5, ge=0, le=1, description="α at the start: share of a client's own model in its mixture")
    adaptive: bool = Field(True, description="each client's α follows its gradient")


class FedAMPConfig(BaseModel):
    """Keys of FedAMP."""

    model_config = keys("fedamp.")

    sigma: float = Field(
        100.0,
        gt=0,
        allow_inf_nan=False,
        description="σ, squared distance of two models at which their attention has fallen to 1/e; distances grow with "
        "parameters, learning rate and steps: see distances in rounds/*.npz",
    )
    alpha: float = Field(
        10.0, gt=0, allow_inf_nan=False, description="α: equal models weigh α/σ in each other's mixture"
    )
    lam: float = Field(
        1.0, ge=0, allow_inf_nan=False, alias="fedamp.lambda", description="λ of the proximal term λ/(2α)·‖w − u‖²"
    )


class FedBEConfig(BaseModel):
    """Keys of FedBE."""

    model_config = keys("fedbe.")

    distribution: Literal["gaussian", "dirichlet"] = Field(
        "gaussian", description="what is fitted over the clients' models of a round"
    )
    samples: int = Field(10, ge=0, le=1000, description="M, models drawn from it for the ensemble")
    concentration: float = Field(
        1.0, gt=0, allow_inf_nan=False, description="of dirichlet: the smaller, the nearer to single clients' models"
    )
    distil: bool = Field(
        True,
        description="the ensemble is distilled into the next model, on the server's unlabelled examples "
        "(server-share); false: the next model is one draw",
    )
    epochs: int = Field(20, ge=1, le=10_000, description="passes over these examples in one distillation")
    learning_rate: float = Field(
        1e-3, gt=0, le=100, description="of the distillation's SGD; it falls to 0.4 of it in cycles of 25 steps"
    )
    batch_size: int = Field(128, ge=1, description="examples in a step of the distillation")
