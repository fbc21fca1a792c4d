"""In the style of tutorials on reinforcement learning over RPC: an agent decides for its observers."""

import os

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch.distributed.rpc import RRef, remote, rpc_async, rpc_sync

AGENT_NAME = "agent"
OBSERVER_NAME = "observer{}"


class Observer:
    def __init__(self):
        self.id = rpc.get_worker_info().id
        self.state = torch.zeros(4)

    def run_episode(self, agent_rref, n_steps):
        total = 0.0
        for _ in range(n_steps):
            action = agent_rref.rpc_sync().select_action(self.id, self.state)
            self.state += action
            reward = float(self.id)
            agent_rref.rpc_sync().report_reward(self.id, reward)
            total += reward
        return total


class Agent:
    def __init__(self, world_size):
        self.agent_rref = RRef(self)
        self.rewards = {}
        self.ob_rrefs = []
        for ob_rank in range(1, world_size):
            ob_info = rpc.get_worker_info(OBSERVER_NAME.format(ob_rank))
            self.ob_rrefs.append(remote(ob_info, Observer))
            self.rewards[ob_info.id] = []

    def select_action(self, ob_id, state):
        return torch.ones_like(state) * ob_id

    def report_reward(self, ob_id, reward):
        self.rewards[ob_id].append(reward)

    def run_episode(self, n_steps):
        futs = [rpc_async(rref.owner(), _run_at_owner, args=(rref, self.agent_rref, n_steps)) for rref in self.ob_rrefs]
        return [fut.wait() for fut in futs]


def _run_at_owner(ob_rref, agent_rref, n_steps):
    return ob_rref.local_value().run_episode(agent_rref, n_steps)


def _double(x):
    return 2 * x


def run_worker(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "29500"
    result = None
    if rank == 0:
        rpc.init_rpc(AGENT_NAME, rank=rank, world_size=world_size)
        agent = Agent(world_size)
        totals = agent.run_episode(n_steps=4)
        result = totals, agent.rewards, rpc_sync(OBSERVER_NAME.format(1), _double, args=(21,))
    else:
        rpc.init_rpc(OBSERVER_NAME.format(rank), rank=rank, world_size=world_size)
    rpc.shutdown()
    return result


if __name__ == "__main__":
    mp.spawn(run_worker, args=(3,), nprocs=3, join=True)
