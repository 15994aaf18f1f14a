//! The rank's own end of a call: where its results lie, what of them it adds or copies itself, and the waiting.

use super::area::Area;
use super::call::{Landing, Round, Slot, bytes, messages};
use super::world::{Devices, Group, World};
use crate::copy::{Output, Target, dense, write};
use crate::engines::shared::activity;
use crate::engines::shared::names;
use crate::engines::shared::seat::{Posted, World as _};
use crate::exchange::{Exchange, Piece, Place, all_reduce_steps};
use crate::plan::{Plan, Source, Tile};
use crate::{Buffer, Collective, CommError, DeviceTensor, Parts};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Sums of fewer bytes are made by everyone from everyone's terms: less data would travel otherwise, but one after the
/// other.
const SMALL: usize = 32 << 10;

/// What a rank keeps of a call for the time when messages are in.
pub enum Own {
    /// Its tensors, which are the result unless others are handed over to it.
    Kept(Vec<Buffer>),
    /// Its tensors, the plans of the results, and where the results lie.
    Placed {
        buffers: Vec<Buffer>,
        plans: Vec<Plan>,
        targets: Vec<Target>,
    },
    /// Nothing: the engine's thread makes the sums, so that the others get them whether or not this rank waits.
    Summed,
}

/// A large all-reduce: flat tensors, and of each flat sum this rank's own part, which the others then get.
pub struct Sums {
    buffers: Vec<Buffer>,
    plans: Vec<Plan>,
}

/// A call whose messages and memory are laid out.
pub struct Placed {
    pub own: Own,
    pub landing: Landing,
    pub round: Round,
    /// What the messages are sent from.
    pub inputs: Vec<Buffer>,
    /// What the engine's thread needs for a second round, if there is one.
    pub sums: Option<Sums>,
}

/// Room for the results, and the messages of the first round.
///
/// # Errors
/// If the plans do not fit, which the caller has ruled out.
pub fn place(
    ops: &[Collective],
    plans: Vec<Plan>,
    buffers: Vec<Buffer>,
    size: usize,
    rank: usize,
) -> Result<Placed, CommError> {
    let bytes = |buffer: &Buffer| buffer.num_elements() * buffer.dtype().size();
    let all: usize = buffers.iter().map(bytes).sum();
    if ops[0] == Collective::AllReduce && all > SMALL {
        return place_sums(buffers, size, rank);
    }
    let transfers: Vec<_> = ops.iter().zip(buffers.iter().map(Buffer::shape)).collect();
    let exchange = Exchange::new(&transfers, size, rank).map_err(CommError::invalid)?;
    let outputs = plans.iter().zip(&buffers);
    let outputs = outputs.map(|(plan, buffer)| (Output::new(&plan.shape, buffer.dtype()), plan.shape.clone()));
    let (mut landing, round) = lay_out(outputs.collect(), &plans, &exchange, &buffers);
    let targets = landing.outputs.iter_mut().map(|(output, _)| output.target()).collect();
    Ok(Placed {
        landing,
        round,
        inputs: buffers.clone(),
        own: Own::Placed {
            buffers,
            plans,
            targets,
        },
        sums: None,
    })
}

/// A large all-reduce: everyone sums an equal part of the flat tensor.
fn place_sums(buffers: Vec<Buffer>, size: usize, rank: usize) -> Result<Placed, CommError> {
    let (mut flat, mut outputs, mut plans, mut ops) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for buffer in buffers {
        let (elements, shape) = (buffer.num_elements(), buffer.shape().to_vec());
        outputs.push((Output::new(&[elements], buffer.dtype()), shape));
        let [scatter, _] = all_reduce_steps(elements, size);
        let mut plan = Plan::new(&scatter, size, rank, &[elements]).map_err(CommError::invalid)?;
        // Into the whole sum, at the place of this rank's part.
        let start = Parts::contiguous(elements, size).of(rank)[0].start;
        plan.tiles.iter_mut().for_each(|tile| tile.start[0] += start);
        plans.push(plan);
        flat.push(flatten(&buffer)?);
        ops.push(scatter);
    }
    let transfers: Vec<_> = ops.iter().zip(flat.iter().map(Buffer::shape)).collect();
    let exchange = Exchange::new(&transfers, size, rank).map_err(CommError::invalid)?;
    let (landing, round) = lay_out(outputs, &plans, &exchange, &flat);
    Ok(Placed {
        own: Own::Summed,
        landing,
        round,
        inputs: flat.clone(),
        sums: Some(Sums { buffers: flat, plans }),
    })
}

impl Sums {
    /// This rank's parts, now that all terms are there, and the round in which everyone gets everyone's.
    pub fn second_round(self, mut landing: Landing, size: usize, rank: usize) -> (Round, Landing) {
        complete(&self.plans, &self.buffers, rank, &mut landing);
        let mut round = Round::new(size);
        for ((output, _), buffer) in landing.outputs.iter_mut().zip(&self.buffers) {
            let parts = Parts::contiguous(buffer.num_elements(), size);
            let target = output.target();
            let area = |member: usize| {
                let part = &parts.of(member)[0];
                Area::of_target(&target, &[part.start], &[part.len()])
            };
            for other in (0..size).filter(|other| *other != rank) {
                round.sends[other].push(area(rank));
                round.receives[other].push(area(other));
            }
        }
        (round, landing)
    }
}

/// What an exchange sends and receives: from where the tensors lie and to where the results do, where a box is a run of
/// bytes there; else it is packed and unpacked. Terms of sums come in beside the results.
fn lay_out(
    mut outputs: Vec<(Output, Vec<usize>)>,
    plans: &[Plan],
    exchange: &Exchange,
    buffers: &[Buffer],
) -> (Landing, Round) {
    let targets: Vec<_> = outputs.iter_mut().map(|(output, _)| output.target()).collect();
    let mut round = Round::new(exchange.sends.len());
    for (areas, pieces) in round.sends.iter_mut().zip(&exchange.sends) {
        *areas = outgoing(pieces, buffers, &mut round.packed);
    }
    let mut landing = Landing {
        outputs,
        ..Landing::default()
    };
    for (areas, places) in round.receives.iter_mut().zip(&exchange.receives) {
        let tile = |place: &Place| &plans[place.transfer].tiles[place.tile];
        let into = |place: &Place| Area::of_target(&targets[place.transfer], &tile(place).start, &tile(place).shape);
        areas.extend(places.iter().map(into));
        let one_by_one = go_one_by_one(areas);
        for (area, place) in areas.iter_mut().zip(places) {
            let tile = tile(place);
            if tile.sources.len() > 1 || one_by_one && !area.is_dense() {
                let mut term = Output::new(&tile.shape, targets[place.transfer].dtype);
                *area = Area::of_target(&term.target(), &vec![0; tile.shape.len()], &tile.shape);
                landing.terms.insert(*place, (term, tile.shape.clone()));
            }
        }
    }
    (landing, round)
}

fn go_one_by_one(areas: &[Area]) -> bool {
    messages(&bytes(areas)).iter().all(|message| message.len() == 1)
}

/// A copy of a box, its elements in a row.
fn pack(buffer: &Buffer, piece: &Piece) -> Output {
    let mut packed = Output::new(&piece.shape, buffer.dtype());
    let origin = vec![0; piece.shape.len()];
    // SAFETY: the box is all of the output, of which no one else knows.
    unsafe { copy_box(buffer, &piece.start, &piece.shape, &packed.target(), origin) };
    packed
}

/// Copies a box of a tensor to a place in a result.
///
/// # Safety
/// As for [`write`]: the box must lie in the target, whose memory must be alive and used by no one else there.
unsafe fn copy_box(from: &Buffer, start: &[usize], shape: &[usize], to: &Target, at: Vec<usize>) {
    let tile = Tile {
        start: at,
        shape: shape.to_vec(),
        sources: vec![Source {
            rank: 0,
            start: start.to_vec(),
        }],
    };
    // SAFETY: as the caller vouches.
    unsafe { write(&tile, &[Some(from)], to) };
}

/// From where boxes of these tensors are sent.
fn outgoing(pieces: &[Piece], buffers: &[Buffer], packed: &mut Vec<Output>) -> Vec<Area> {
    let of = |piece: &Piece| Area::of_buffer(&buffers[piece.transfer], &piece.start, &piece.shape);
    let mut areas: Vec<_> = pieces.iter().map(of).collect();
    if go_one_by_one(&areas) {
        for (area, piece) in areas.iter_mut().zip(pieces).filter(|(area, _)| !area.is_dense()) {
            let mut copy = pack(&buffers[piece.transfer], piece);
            *area = Area::of_target(&copy.target(), &vec![0; piece.shape.len()], &piece.shape);
            packed.push(copy);
        }
    }
    areas
}

/// What this rank hands over to others; what others hand over to it is not known yet.
pub fn hand_over(op: &Collective, buffers: Vec<Buffer>, size: usize, rank: usize) -> Placed {
    let mut round = Round::new(size);
    let whole = |(transfer, buffer): (usize, &Buffer)| Piece {
        transfer,
        start: vec![0; buffer.shape().len()],
        shape: buffer.shape().to_vec(),
    };
    let pieces: Vec<_> = buffers.iter().enumerate().map(whole).collect();
    let others = (0..size).filter(|other| *other != rank);
    for receiver in others.filter(|other| op.sender(*other, size) == Some(rank)) {
        round.sends[receiver] = match round.sends.iter().find(|areas| !areas.is_empty()) {
            // Of a broadcast: the same to everyone.
            Some(areas) => areas.clone(),
            None => outgoing(&pieces, &buffers, &mut round.packed),
        };
    }
    Placed {
        round,
        landing: Landing::default(),
        inputs: buffers.clone(),
        own: Own::Kept(buffers),
        sums: None,
    }
}

/// The tensor in one dimension.
fn flatten(buffer: &Buffer) -> Result<Buffer, CommError> {
    let whole = Area::of_buffer(buffer, &vec![0; buffer.shape().len()], buffer.shape());
    let row_major = if whole.is_dense() {
        buffer.clone()
    } else {
        dense(buffer)?
    };
    let view = row_major.host().expect("the tensor is in host memory");
    let (elements, dtype) = (buffer.num_elements(), buffer.dtype());
    Buffer::new(view.bytes.clone(), vec![elements], vec![1], view.offset, dtype)
}

/// Copies what a rank has of its own results.
///
/// # Safety
/// The targets' memory must be alive.
unsafe fn copy_own(plans: &[Plan], buffers: &[Buffer], rank: usize, targets: &[Target]) {
    for (transfer, plan) in plans.iter().enumerate() {
        for tile in &plan.tiles {
            if let [from] = &tile.sources[..]
                && from.rank == rank
            {
                let (target, at) = (&targets[transfer], tile.start.clone());
                // SAFETY: the tile lies in the result, and no message is received there.
                unsafe { copy_box(&buffers[transfer], &from.start, &tile.shape, target, at) };
            }
        }
    }
}

/// Adds and copies what came in beside the results, when all of it is there.
fn complete(plans: &[Plan], buffers: &[Buffer], rank: usize, landing: &mut Landing) {
    for (transfer, plan) in plans.iter().enumerate() {
        let target = landing.outputs[transfer].0.target();
        for (index, tile) in plan.tiles.iter().enumerate() {
            let place = |source| Place {
                transfer,
                tile: index,
                source,
            };
            if tile.sources.len() == 1 && !landing.terms.contains_key(&place(0)) {
                continue; // It was received there, or copied.
            }
            let mut sources = Vec::new();
            let mut terms = Vec::new();
            for (source, from) in tile.sources.iter().enumerate() {
                let (term, start) = if from.rank == rank {
                    (buffers[transfer].clone(), from.start.clone())
                } else {
                    let (term, shape) = landing
                        .terms
                        .remove(&place(source))
                        .expect("every term has been received");
                    let start = vec![0; shape.len()];
                    // SAFETY: the message that filled it is over.
                    (unsafe { term.finish(shape) }, start)
                };
                sources.push(Source {
                    rank: terms.len(),
                    start,
                });
                terms.push(term);
            }
            let tile = Tile {
                start: tile.start.clone(),
                shape: tile.shape.clone(),
                sources,
            };
            let terms: Vec<_> = terms.iter().map(Some).collect();
            // SAFETY: the tile lies in the output, which is this rank's alone by now.
            unsafe { write(&tile, &terms, &target) };
        }
    }
}

/// A call that the engine's thread works on.
pub struct UnderWay {
    pub world: Arc<World>,
    pub group: Arc<Group>,
    pub rank: usize,
    pub call: activity::Call,
    pub slot: Arc<Slot>,
    pub own: Own,
    pub devices: Devices,
}

impl Posted for UnderWay {
    fn results(self: Box<Self>, deadline: Instant) -> Result<Vec<Buffer>, CommError> {
        if let Own::Placed {
            buffers,
            plans,
            targets,
        } = &self.own
        {
            // While the others' part is on its way.
            // SAFETY: results are held by the call, then by its slot until they are taken from it below; of a call that
            // failed or was given up they are never freed.
            unsafe { copy_own(plans, buffers, self.rank, targets) };
        }
        let mut landing = self.await_slot(deadline)?;
        match &self.own {
            Own::Kept(_) | Own::Summed => {}
            Own::Placed { buffers, plans, .. } => complete(plans, buffers, self.rank, &mut landing),
        }
        let results: Vec<Buffer> = match self.own {
            Own::Kept(buffers) if landing.outputs.is_empty() => buffers,
            // SAFETY: tiles cover a result, and all of them have been received or written.
            _ => unsafe {
                landing
                    .outputs
                    .into_iter()
                    .map(|(output, shape)| output.finish(shape))
                    .collect()
            },
        };
        onto_devices(results, &self.devices)
    }
}

impl UnderWay {
    fn await_slot(&self, deadline: Instant) -> Result<Landing, CommError> {
        // Failures are not signalled to every slot, so no sleep is long.
        const LONG: Duration = Duration::from_millis(50);
        loop {
            let remaining = deadline.saturating_duration_since(Instant::now());
            let missing = match self.slot.wait(remaining.min(LONG)) {
                Ok(outcome) => return outcome,
                Err(missing) => missing,
            };
            if let Some(error) = self.world.failure() {
                return Err(error);
            }
            let (rank, call, control) = (self.group.ranks[self.rank], &self.call, &self.world.control);
            let whom = match missing[..] {
                [] => "the others' tensors".into(),
                _ => names(missing.iter().copied()),
            };
            let left = |rank: &&usize| control.has_left(**rank, self.group.id, call.sequence);
            if let Some(left) = missing.iter().find(left) {
                return Err(control.departed(*left, format!("rank {rank} is in {call}, waiting for {whom}")));
            }
            if remaining.is_zero() {
                return Err(control.late(call.waited(rank, control.timeout(), &whom)));
            }
        }
    }
}

/// Results back on the devices where the tensors were.
fn onto_devices(results: Vec<Buffer>, devices: &Devices) -> Result<Vec<Buffer>, CommError> {
    let back = |(result, device): (Buffer, &Option<_>)| match device {
        None => Ok(result),
        Some(device) => {
            let device: &Arc<dyn DeviceTensor> = device;
            device.upload(result).map(Buffer::on_device)
        }
    };
    results.into_iter().zip(devices).map(back).collect()
}
