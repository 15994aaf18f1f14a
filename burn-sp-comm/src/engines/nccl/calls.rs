//! What NCCL is asked for in a collective, and how the results come of its answers. Nothing here knows a device, so that
//! it is tested without one.
//!
//! | collective | is |
//! |---|---|
//! | all-gather of parts of one length, none twice | `ncclAllGather` of the tensors as they are, put in order afterwards if need be |
//! | reduce-scatter to parts of one length | `ncclReduceScatter` of the tensor, put in the order of the ranks before if need be |
//! | all-reduce | `ncclAllReduce` |
//! | broadcast | `ncclBroadcast` |
//! | everything else | `ncclSend` and `ncclRecv` of dense boxes, in one group |
//!
//! Sums are NCCL's where its type is wide enough: f32, f64, the integers it has; booleans are or-ed, which is the
//! maximum of zeros and ones. f16 and bf16 are to be added up in f32 in rank order, so their terms are sent and added by
//! the tensor's own backend; an all-reduce of them is a reduce-scatter and an all-gather.

use crate::buffer::{Storage, row_major};
use crate::copy::{assemble, dense as host_copy};
use crate::exchange::{Exchange, all_reduce_steps};
use crate::plan::{Source, Tile};
use crate::{Buffer, Collective, CommError, Parts, Plan, Transfer};
use burn_std::{BoolStore, DType};
use cudarc::nccl::sys::{ncclDataType_t, ncclRedOp_t};
use std::ops::Range;
use std::sync::Arc;

/// One call of NCCL.
#[derive(Debug)]
pub struct Call {
    pub what: What,
    /// What it reads: a dense tensor.
    pub from: Option<Buffer>,
    /// What it writes: a dense tensor that is to be made for it.
    pub to: Option<(Vec<usize>, DType)>,
}

/// Ranks are those within the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    AllGather,
    ReduceScatter,
    AllReduce,
    /// The root reads, the others write.
    Broadcast {
        root: usize,
    },
    Send {
        to: usize,
    },
    Receive {
        from: usize,
    },
}

/// Whoever makes the calls.
pub trait Library {
    /// Makes the calls as one group; there may be none, and those about no element are left out. Returns what they have
    /// written, in their order.
    fn group(&self, calls: Vec<Call>) -> Result<Vec<Option<Buffer>>, CommError>;
}

/// How a result comes about once the calls are made.
enum Ending {
    /// It is the rank's own tensor.
    Own(Buffer),
    /// It is what a call has written, in this shape.
    Written { call: usize, shape: Vec<usize> },
    /// A plan in which source 0 is the own tensor, and source `i + 1` what `calls[i]` has written.
    Assembled { plan: Plan, own: Buffer, calls: Vec<usize> },
}

/// How NCCL adds up tensors, where it does it as it is done here.
pub fn reduction(dtype: DType) -> Option<(ncclDataType_t, ncclRedOp_t)> {
    use ncclDataType_t::*;
    use ncclRedOp_t::{ncclMax, ncclSum};
    match dtype {
        DType::F64 => Some((ncclFloat64, ncclSum)),
        DType::F32 | DType::Flex32 => Some((ncclFloat32, ncclSum)),
        DType::I64 => Some((ncclInt64, ncclSum)),
        DType::I32 => Some((ncclInt32, ncclSum)),
        DType::I8 => Some((ncclInt8, ncclSum)),
        DType::U64 => Some((ncclUint64, ncclSum)),
        DType::U32 => Some((ncclUint32, ncclSum)),
        DType::U8 => Some((ncclUint8, ncclSum)),
        DType::Bool(BoolStore::Native | BoolStore::U8) => Some((ncclUint8, ncclMax)),
        DType::Bool(BoolStore::U32) => Some((ncclUint32, ncclMax)),
        DType::F16 | DType::BF16 | DType::I16 | DType::U16 | DType::QFloat(_) => None,
    }
}

/// Carries out a call of a collective on `rank` in a group of `size`.
///
/// `handed`: the shapes and dtypes of the sender's tensors, for the operations that hand tensors over.
///
/// # Errors
/// Those of the library and of the tensors' backend.
pub fn carry_out(
    library: &impl Library,
    transfers: Vec<Transfer>,
    size: usize,
    rank: usize,
    handed: Option<&[(Vec<usize>, DType)]>,
) -> Result<Vec<Buffer>, CommError> {
    let in_steps = |transfer: &Transfer| {
        let Transfer { op, buffer } = transfer;
        *op == Collective::AllReduce && reduction(buffer.dtype()).is_none()
    };
    let split: Vec<bool> = transfers.iter().map(in_steps).collect();
    if !split.contains(&true) {
        return in_one_group(library, transfers, size, rank, handed);
    }
    // The shapes to return to, and the second step.
    let mut later = Vec::new();
    let first = transfers.into_iter().zip(&split).map(|(transfer, split)| {
        let Transfer { op, buffer } = transfer;
        if !split {
            return Ok(Transfer { op, buffer });
        }
        let elements = buffer.num_elements();
        let [scatter, gather] = all_reduce_steps(elements, size);
        later.push((gather, buffer.shape().to_vec()));
        let buffer = dense(&buffer, &[elements])?;
        Ok(Transfer { op: scatter, buffer })
    });
    let first = first.collect::<Result<Vec<_>, CommError>>()?;
    let mut results = in_one_group(library, first, size, rank, None)?;
    let places: Vec<usize> = (0..split.len()).filter(|place| split[*place]).collect();
    let second = places.iter().zip(&later).map(|(place, (op, _))| Transfer {
        op: op.clone(),
        buffer: results[*place].clone(),
    });
    let wholes = in_one_group(library, second.collect(), size, rank, None)?;
    for ((place, whole), (_, shape)) in places.iter().zip(wholes).zip(&later) {
        results[*place] = dense(&whole, shape)?;
    }
    Ok(results)
}

fn in_one_group(
    library: &impl Library,
    transfers: Vec<Transfer>,
    size: usize,
    rank: usize,
    handed: Option<&[(Vec<usize>, DType)]>,
) -> Result<Vec<Buffer>, CommError> {
    let mut calls = Calls {
        size,
        rank,
        list: Vec::new(),
    };
    let endings = transfers
        .into_iter()
        .enumerate()
        .map(|(transfer, Transfer { op, buffer })| calls.ask(&op, buffer, handed.map(|all| &all[transfer])))
        .collect::<Result<Vec<_>, CommError>>()?;
    let written = library.group(calls.list)?;
    let written = |call: usize| written[call].as_ref().expect("a call that writes has written");
    let result = |ending: Ending| match ending {
        Ending::Own(buffer) => Ok(buffer),
        Ending::Written { call, shape } => dense(written(call), &shape),
        Ending::Assembled { plan, own, calls } => {
            let received = calls.iter().map(|call| Some(written(*call)));
            let sources: Vec<_> = [Some(&own)].into_iter().chain(received).collect();
            assemble(plan, &own, &sources)
        }
    };
    endings.into_iter().map(result).collect()
}

/// The calls of a group, in the making.
struct Calls {
    size: usize,
    rank: usize,
    list: Vec<Call>,
}

impl Calls {
    fn add(&mut self, what: What, from: Option<Buffer>, to: Option<(Vec<usize>, DType)>) -> usize {
        self.list.push(Call { what, from, to });
        self.list.len() - 1
    }

    /// Adds what a transfer needs.
    fn ask(
        &mut self,
        op: &Collective,
        buffer: Buffer,
        handed: Option<&(Vec<usize>, DType)>,
    ) -> Result<Ending, CommError> {
        let (shape, dtype) = (buffer.shape().to_vec(), buffer.dtype());
        match op {
            Collective::Barrier => Ok(Ending::Own(buffer)),
            Collective::Shift { .. } if op.sender(self.rank, self.size) == Some(self.rank) => Ok(Ending::Own(buffer)),
            Collective::Broadcast { root } => self.broadcast(*root, buffer, handed),
            Collective::AllReduce => {
                let from = dense(&buffer, &shape)?;
                let call = self.add(What::AllReduce, Some(from), Some((shape.clone(), dtype)));
                Ok(Ending::Written { call, shape })
            }
            Collective::AllGather { parts, .. } if even(parts) && disjoint(parts) => self.all_gather(op, buffer),
            Collective::ReduceScatter { parts, .. } if even(parts) && reduction(dtype).is_some() => {
                self.reduce_scatter(op, &buffer)
            }
            _ => self.boxes(op, buffer, handed),
        }
    }

    fn broadcast(
        &mut self,
        root: usize,
        buffer: Buffer,
        handed: Option<&(Vec<usize>, DType)>,
    ) -> Result<Ending, CommError> {
        if root == self.rank {
            let from = dense(&buffer, buffer.shape())?;
            self.add(What::Broadcast { root }, Some(from), None);
            return Ok(Ending::Own(buffer));
        }
        let (shape, dtype) = handed.ok_or_else(unknown)?.clone();
        let call = self.add(What::Broadcast { root }, None, Some((shape.clone(), dtype)));
        Ok(Ending::Written { call, shape })
    }

    /// The tensors one after another, by rank, are one whose first dimension is as many times as long.
    fn all_gather(&mut self, op: &Collective, own: Buffer) -> Result<Ending, CommError> {
        let (shape, dtype) = (own.shape(), own.dtype());
        let mut plan = plan_of(op, self.size, self.rank, shape)?;
        let mut gathered = shape.to_vec();
        gathered[0] *= self.size;
        for source in plan.tiles.iter_mut().flat_map(|tile| &mut tile.sources) {
            source.start[0] += source.rank * shape[0];
            source.rank = 1;
        }
        let from = dense(&own, shape)?;
        let call = self.add(What::AllGather, Some(from), Some((gathered.clone(), dtype)));
        Ok(match in_order(&plan, &gathered) {
            true => Ending::Written {
                call,
                shape: plan.shape,
            },
            false => Ending::Assembled {
                plan,
                own,
                calls: vec![call],
            },
        })
    }

    /// What the ranks get, one after another, is a tensor whose first dimension is as many times as long.
    fn reduce_scatter(&mut self, op: &Collective, buffer: &Buffer) -> Result<Ending, CommError> {
        let result = plan_of(op, self.size, self.rank, buffer.shape())?.shape;
        let mut packed = Plan {
            shape: result.clone(),
            tiles: Vec::new(),
        };
        packed.shape[0] *= self.size;
        for rank in 0..self.size {
            let of_rank = plan_of(op, self.size, rank, buffer.shape())?.tiles.into_iter();
            packed.tiles.extend(of_rank.map(|mut tile| {
                tile.start[0] += rank * result[0];
                // All ranks' boxes are at the same place.
                tile.sources.truncate(1);
                tile.sources[0].rank = 0;
                tile
            }));
        }
        let from = match in_order(&packed, buffer.shape()) {
            true => dense(buffer, &packed.shape)?,
            false => assemble(packed, buffer, &[Some(buffer)])?,
        };
        let call = self.add(What::ReduceScatter, Some(from), Some((result.clone(), buffer.dtype())));
        Ok(Ending::Written { call, shape: result })
    }

    /// Sends of the boxes that others need, and receptions of those that this rank needs.
    fn boxes(
        &mut self,
        op: &Collective,
        own: Buffer,
        handed: Option<&(Vec<usize>, DType)>,
    ) -> Result<Ending, CommError> {
        let (sent_shape, dtype) = match op.sender(self.rank, self.size) {
            Some(sender) if sender != self.rank => handed.ok_or_else(unknown)?.clone(),
            _ => (own.shape().to_vec(), own.dtype()),
        };
        let mut plan = plan_of(op, self.size, self.rank, &sent_shape)?;
        let exchange = Exchange::new(&[(op, own.shape())], self.size, self.rank).map_err(CommError::invalid)?;
        for place in &exchange.own {
            plan.tiles[place.tile].sources[place.source].rank = 0;
        }
        let mut calls = Vec::new();
        for peer in 0..self.size {
            for piece in &exchange.sends[peer] {
                let from = cut(&own, &piece.start, &piece.shape)?;
                self.add(What::Send { to: peer }, Some(from), None);
            }
            for place in &exchange.receives[peer] {
                let tile = &mut plan.tiles[place.tile];
                let to = (tile.shape.clone(), dtype);
                calls.push(self.add(What::Receive { from: peer }, None, Some(to)));
                tile.sources[place.source] = Source {
                    rank: calls.len(),
                    start: vec![0; tile.shape.len()],
                };
            }
        }
        Ok(match (&plan.tiles[..], &calls[..]) {
            // Nothing but one box, whole: it is the result.
            ([tile], [call]) if tile.sources.len() == 1 => Ending::Written {
                call: *call,
                shape: plan.shape,
            },
            _ => Ending::Assembled { plan, own, calls },
        })
    }
}

fn plan_of(op: &Collective, size: usize, rank: usize, shape: &[usize]) -> Result<Plan, CommError> {
    Plan::new(op, size, rank, shape).map_err(CommError::invalid)
}

fn unknown() -> CommError {
    CommError::invalid("nccl: the shape of a tensor that is handed over is not known")
}

/// Whether all parts are of one length.
fn even(parts: &Parts) -> bool {
    (1..parts.ranks()).all(|rank| parts.len_of(rank) == parts.len_of(0))
}

/// Whether nothing is in two parts, given that together they are the whole.
fn disjoint(parts: &Parts) -> bool {
    (0..parts.ranks()).map(|rank| parts.len_of(rank)).sum::<usize>() == parts.extent()
}

/// Whether a plan of one source, dense and of this shape, leaves every element where it lies.
fn in_order(plan: &Plan, source: &[usize]) -> bool {
    let stays = |tile: &Tile| {
        let from = stretch(source, &tile.sources[0].start, &tile.shape);
        from.is_some() && from == stretch(&plan.shape, &tile.start, &tile.shape)
    };
    plan.tiles.iter().all(stays)
}

/// The elements of a box in a dense tensor, if they lie one after another.
fn stretch(whole: &[usize], start: &[usize], shape: &[usize]) -> Option<Range<usize>> {
    let first_long = shape.iter().position(|length| *length > 1).unwrap_or(shape.len());
    let inner = (first_long + 1).min(shape.len())..shape.len();
    if shape[inner.clone()] != whole[inner] {
        return None;
    }
    let strides = row_major(whole);
    let at: usize = start
        .iter()
        .zip(strides)
        .map(|(start, stride)| start * stride as usize)
        .sum();
    Some(at..at + shape.iter().product::<usize>())
}

/// A dense copy of a box, or the tensor itself where the box is all of it.
fn cut(buffer: &Buffer, start: &[usize], shape: &[usize]) -> Result<Buffer, CommError> {
    if shape == buffer.shape() {
        return dense(buffer, shape);
    }
    let source = Source {
        rank: 0,
        start: start.to_vec(),
    };
    let tile = Tile {
        start: vec![0; shape.len()],
        shape: shape.to_vec(),
        sources: vec![source],
    };
    let plan = Plan {
        shape: shape.to_vec(),
        tiles: vec![tile],
    };
    dense(&assemble(plan, buffer, &[Some(buffer)])?, shape)
}

/// The elements one after another, in this shape; on a device a copy only where they do not lie so.
pub fn dense(buffer: &Buffer, shape: &[usize]) -> Result<Buffer, CommError> {
    match buffer.storage() {
        Storage::Host(view) => {
            let strides = row_major(buffer.shape());
            let whole = buffer.num_elements() * buffer.dtype().size() == view.bytes.len();
            let bytes = match whole && view.offset == 0 && view.strides == strides {
                true => view.bytes.clone(),
                false => {
                    let copy = host_copy(buffer)?;
                    let (Storage::Host(view), ..) = copy.into_parts() else {
                        return Err(elsewhere());
                    };
                    view.bytes
                }
            };
            Buffer::new(bytes, shape.to_vec(), row_major(shape), 0, buffer.dtype())
        }
        Storage::Device(tensor) => {
            let tensor: Arc<_> = tensor.cuda().ok_or_else(elsewhere)?.dense(shape);
            Ok(Buffer::on_device(tensor))
        }
    }
}

/// NCCL reaches no other device.
pub fn elsewhere() -> CommError {
    CommError::invalid("nccl: tensors must be in host memory or on a CUDA device: make the device with Device::cuda")
}
